"""Ranks for tests: forked ones for most tests, which need not import again, and real torchruns for the launch itself.

All processes started here end with the tests, even if the tests are interrupted or killed.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import torch
import torch.distributed as dist

from phalanx.telemetry.flops import COUNTED, peak_flops

ROOT = Path(__file__).parents[2]
GRACE_S = 2.0  # after the first failure: time for the other ranks to fail by themselves with a message
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
SHARED = "diffusers", "phalanx", "torch", "transformers"  # packages that ranks need not import again
APART = "torch._inductor"  # except for this part, which starts processes
LIMIT_S = 240.0  # for jobs that should succeed: far more than they take on a busy machine, and below pytest's limit

_ports: list[socket.socket] = []  # reservations of the ports that `free_port` has returned


class RankError(AssertionError):
    """Ranks that raised, died or hung; the message has the output of each of them, in the order of failure."""


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = LIMIT_S,
    local_world: int | None = None,
    init: bool = True,
) -> list[Any]:
    """Call `fn(*args)` on `world` forked ranks, and return their results by rank.

    Each rank has torchrun's environment variables and, with `init`, the gloo group of a FileStore as its default
    group; `local_world` ranks form a node (default: all). Results are passed through torch.save, so they may be
    tensors. If a rank raises, dies, or is still running after `timeout` seconds, all ranks are ended, and RankError is
    raised.

    The fork copies the test process, which must not have running threads (in particular none that wait for work while
    holding a lock); torch must use one thread, which conftest.py ensures.
    """
    before_forks()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks: list[BaseProcess] = []
        try:
            for rank in range(world):
                env = rank_environment(rank, world, local_world or world)
                process = context.Process(target=_rank_main, args=(folder, rank, world, env, init, timeout, fn, args))
                process.start()
                ranks.append(process)
            hung = _join(ranks, timeout)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        failures = _failures(folder, ranks, hung)
        if failures:
            what = f"{fn.__qualname__} on {world} ranks"
            raise RankError(
                "\n\n".join([f"{what}: {', '.join(head for head, _ in failures)}", *(t for _, t in failures)])
            )
        keep_finds(folder)
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def before_forks() -> None:
    """Do once in this process what each forked copy would otherwise repeat: measurements and garbage collection."""
    peak_flops(torch.device("cpu"), torch.float32)  # measured once per process
    if dist.is_initialized():  # by a test that failed: ranks would wait for threads that a fork does not have
        dist.destroy_process_group()
    gc.collect()  # remains of earlier tests' process groups end their threads here, not in a copy without the threads
    # Otherwise each collection in a rank, and in a later call here, would scan everything that was imported, for most of
    # a second, and in a rank copy all of its pages.
    gc.freeze()


def write_finds(path: Path, before: set[str]) -> None:
    """Record for `keep_finds` the modules that a rank has imported (`before`: earlier ones) and counted operations."""
    files = [name for name, module in sys.modules.items() if name not in before and vars(module).get("__file__")]
    # transformers also lists some modules under former names, which cannot be imported
    named = [name for name in files if vars(sys.modules[name]).get("__name__") == name]
    shared = [name for name in named if name.partition(".")[0] in SHARED and not name.startswith(APART)]
    path.with_suffix(".finds").write_text(json.dumps([shared, COUNTED]))


def keep_finds(folder: Path) -> None:
    """Import the modules, and keep the counts, of ranks: the ranks of later tests are copies of this process."""
    for path in sorted(folder.glob("*.finds")):
        names, counted = json.loads(path.read_text())
        COUNTED.update(counted)
        for name in names:
            importlib.import_module(name)


def rank_environment(rank: int, world: int, local_world: int) -> dict[str, str]:
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank % local_world,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": local_world,
        "GROUP_RANK": rank // local_world,
        "GROUP_WORLD_SIZE": world // local_world,
    }
    return {name: str(value) for name, value in values.items()}


def _rank_main(
    folder: Path,
    rank: int,
    world: int,
    env: dict[str, str],
    init: bool,
    timeout: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    end_with_parent(signal.SIGKILL)
    os.environ.update(env)
    before = set(sys.modules)
    # torch recreates its thread pool at the first call after a fork, which is not safe from several threads at once
    torch.set_num_threads(1)
    with open(folder / f"{rank}.stack", "w") as stack:
        faulthandler.enable(file=stack)  # the stack of a rank that a signal such as SIGSEGV ends
        # written just before the parent's time limit: the stack of a hung rank
        faulthandler.dump_traceback_later(max(timeout - 0.5, timeout / 2), file=stack)
        try:
            if init:
                store = dist.FileStore(str(folder / "store"), world)
                limit = timedelta(seconds=timeout)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
                dist.barrier()  # otherwise a rank with nothing to do would exit before others have connected to it
            result = fn(*args)
            torch.save(result, folder / f"{rank}.pt")
            write_finds(folder / f"{rank}.pt", before)
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException:
            (folder / f"{rank}.error").write_text(traceback.format_exc())
            os._exit(1)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _join(ranks: Sequence[BaseProcess], timeout: float) -> list[int]:
    """Wait for all ranks; returns those that hang, if no rank has failed."""
    deadline = time.monotonic() + timeout
    failed = False
    while (alive := [p for p in ranks if p.is_alive()]) and (left := deadline - time.monotonic()) > 0:
        wait([p.sentinel for p in alive], timeout=left)
        if not failed and any(p.exitcode not in (None, 0) for p in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    return [] if failed else hung


def _failures(folder: Path, ranks: Sequence[BaseProcess], hung: Sequence[int]) -> list[tuple[str, str]]:
    """(headline, text) of each failed rank in the order of failure, without ranks that were ended because of others."""
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    found = [(f"rank {p.stem} raised", f"rank {p.stem}:\n{p.read_text()}") for p in errors]
    if hung:
        stacks = [f"rank {rank}:\n{(folder / f'{rank}.stack').read_text()}" for rank in hung]
        return [*found, (f"ranks {list(hung)} hung", "\n".join(stacks))]
    told = {int(path.stem) for path in errors}
    for rank, process in enumerate(ranks):
        if rank not in told and process.exitcode not in (0, -signal.SIGKILL):
            stack = (folder / f"{rank}.stack").read_text()
            found.append((f"rank {rank} died", f"rank {rank}: exit status {process.exitcode}\n{stack}"))
    missing = [r for r, p in enumerate(ranks) if p.exitcode == -signal.SIGKILL]
    if missing and not found:
        found.append((f"ranks {missing} were killed", f"ranks {missing}: killed from outside"))
    return found


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send this process a signal when its parent ends; also usable as Popen's preexec_fn."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, int(number))


def free_port() -> int:
    """A free TCP port of the loopback interface.

    It is not one of the kernel's ephemeral ports (from 32768 on), so a connection of a concurrent test does not take
    it. Nor does another test process get it: this process binds a socket name for the port, which the kernel frees when
    the process ends.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if sys.platform == "linux":
                name = socket.socket(socket.AF_UNIX)
                name.bind(f"\0phalanx tests: port {port}")
                _ports.append(name)
            return port


def torchrun(
    args: Sequence[str | Path],
    nproc: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = LIMIT_S,
    cwd: Path = ROOT,
) -> CompletedProcess[str]:
    """Run `sh train.sh ARGS` with `nproc` ranks; raises subprocess.TimeoutExpired, with the output so far."""
    return _launch([{"NPROC_PER_NODE": str(nproc)}], args, env, timeout, cwd)[0]


def two_nodes(
    args: Sequence[str | Path],
    nproc: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = LIMIT_S,
    cwd: Path = ROOT,
) -> tuple[CompletedProcess[str], CompletedProcess[str]]:
    """Run `sh train.sh ARGS` twice at once, as nodes 0 and 1 on loopback with `nproc` ranks each."""
    port = str(free_port())
    common = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NPROC_PER_NODE": str(nproc)}
    first, second = _launch([{**common, "NODE_RANK": str(i)} for i in range(2)], args, env, timeout, cwd)
    return first, second


def launch_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with its interpreter first on PATH, src importable, and without launch variables."""
    launch = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
    launch |= {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "TORCHRUN_ARGS"}
    launch |= {"MAX_RESTARTS", "GRACE_S", "LOG_DIR", "RDZV_ID", "RDZV_CONF"}
    env = {name: value for name, value in os.environ.items() if name not in launch and not name.startswith("SLURM_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), env.get("PYTHONPATH", "")]))
    return {**env, **(extra or {})}


def _launch(
    nodes: Sequence[Mapping[str, str]],
    args: Sequence[str | Path],
    env: Mapping[str, str] | None,
    timeout: float,
    cwd: Path,
) -> list[CompletedProcess[str]]:
    command = ["sh", str(ROOT / "train.sh"), *map(str, args)]
    with tempfile.TemporaryDirectory() as name:
        started = []
        for i, node in enumerate(nodes):
            out, err = Path(name, f"{i}.out"), Path(name, f"{i}.err")
            with out.open("w") as out_file, err.open("w") as err_file:
                process = subprocess.Popen(
                    command,
                    env={**launch_environment(env), **node},
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=out_file,
                    stderr=err_file,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                )
            started.append((process, out, err))
        try:
            _wait([process for process, _, _ in started], timeout)
        except subprocess.TimeoutExpired as expired:
            said = [f"--- node {i}\n{out.read_text()}{err.read_text()}" for i, (_, out, err) in enumerate(started)]
            raise subprocess.TimeoutExpired(command, timeout, output="\n".join(said)) from expired
        return [CompletedProcess(command, p.returncode, out.read_text(), err.read_text()) for p, out, err in started]


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> None:
    """Wait for torchruns; all of them have ended when this returns or raises."""
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End running torchruns: SIGTERM, on which they end their ranks, then SIGKILL to the rest of their sessions."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=35)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
