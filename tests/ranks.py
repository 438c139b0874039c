"""Ranks for tests: forked ones for most (they import nothing again), real torchruns for the launch itself.

Whatever is started here ends with the tests, also where these are interrupted or killed.
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

ROOT = Path(__file__).parent.parent
GRACE_S = 2.0  # after the first failure: time for the other ranks to fail by themselves and say why
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1
SHARED = "diffusers", "phalanx", "torch", "transformers"  # packages that ranks need not import anew
APART = "torch._inductor"  # but for this part, which starts processes
LIMIT_S = 240.0  # of what has to succeed: far above what it takes on a busy machine, and below pytest's limit

_ports: list[socket.socket] = []  # names of those that `free_port` has given


class RankError(AssertionError):
    """Ranks that raised, died or hung; the message holds what each of them said, the first to fail first."""


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = LIMIT_S,
    local_world: int | None = None,
    init: bool = True,
) -> list[Any]:
    """Call `fn(*args)` on `world` forked ranks and return what each returned, by rank.

    Each rank has torchrun's environment variables and, with `init`, the gloo group of a FileStore as its default
    group; `local_world` ranks make a node (default: all). Results travel through torch.save, so tensors are welcome.
    A rank that raises, dies, or is still running after `timeout` seconds ends all of them and raises RankError.

    The fork copies the test process: it must hold no running threads (none that wait for work while holding a lock),
    and torch must be on one thread, which conftest.py sees to.
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
    """Leave to the copies of this process nothing that they would collect, or measure, each for itself."""
    peak_flops(torch.device("cpu"), torch.float32)  # measured once in a process
    gc.collect()  # what is left of earlier tests' process groups ends its threads here, not in a copy that lacks them
    if not dist.is_initialized():
        # Each collection of a rank, and of a later call here, would look through all that was imported, for most of a
        # second, and in a rank copy all its pages.
        gc.freeze()


def write_finds(path: Path, before: set[str]) -> None:
    """Leave to `keep_finds` what a rank has found out: modules, since it had those `before`, and counted operations."""
    files = [name for name, module in sys.modules.items() if name not in before and vars(module).get("__file__")]
    # transformers lists some modules under former names as well, by which nothing can be imported
    named = [name for name in files if vars(sys.modules[name]).get("__name__") == name]
    shared = [name for name in named if name.partition(".")[0] in SHARED and not name.startswith(APART)]
    path.with_suffix(".finds").write_text(json.dumps([shared, COUNTED]))


def keep_finds(folder: Path) -> None:
    """Import and remember what ranks have: those of later tests are copies of this process, and have it then."""
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
    # torch makes its thread pool anew at the first call after a fork, and that is not safe from several threads at once
    torch.set_num_threads(1)
    with open(folder / f"{rank}.stack", "w") as stack:
        # Written just before the parent's limit: where a hung rank stood.
        faulthandler.dump_traceback_later(max(timeout - 0.5, timeout / 2), file=stack)
        try:
            if init:
                store = dist.FileStore(str(folder / "store"), world)
                limit = timedelta(seconds=timeout)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
                dist.barrier()  # a rank with nothing to do would be gone before others have reached it
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
    """Wait for all ranks; returns those that hang although none has failed."""
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
    """(headline, text) of each rank that failed, the first to fail first; ranks ended because of another are left out."""
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    found = [(f"rank {p.stem} raised", f"rank {p.stem}:\n{p.read_text()}") for p in errors]
    if hung:
        stacks = [f"rank {rank}:\n{(folder / f'{rank}.stack').read_text()}" for rank in hung]
        return [*found, (f"ranks {list(hung)} hung", "\n".join(stacks))]
    told = {int(path.stem) for path in errors}
    for rank, process in enumerate(ranks):
        if rank not in told and process.exitcode not in (0, -signal.SIGKILL):
            found.append((f"rank {rank} died", f"rank {rank}: exit status {process.exitcode}"))
    missing = [r for r, p in enumerate(ranks) if p.exitcode == -signal.SIGKILL]
    if missing and not found:
        found.append((f"ranks {missing} were killed", f"ranks {missing}: killed from outside"))
    return found


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the one that started it is gone; for Popen's preexec_fn, too."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, int(number))


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago.

    It is none of those that the kernel hands out by itself (from 32768 on), so a connection of another test that
    runs at the same time does not take it. Nor is it given to another process that runs tests: the first one holds a
    name of the port, which the kernel frees with the process.
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
    """This process's environment, with its interpreter first on PATH, src importable, and no variables of a launch."""
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
    """Wait for torchruns; none of them is left, whatever ends the wait."""
    deadline = time.monotonic() + timeout
    try:
        for process in processes:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    finally:
        _end(processes)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End torchruns that run: SIGTERM, on which they end their ranks, then SIGKILL to what is left of their sessions."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=35)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
