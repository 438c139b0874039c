"""Tasks for tests: run as by `sh train.sh tasks/...`, but in forks of this process, which need not import again."""

import contextlib
import faulthandler
import logging
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import torch
import torch.distributed as dist

from tests.helpers.ranks import (
    GRACE_S,
    LIMIT_S,
    ROOT,
    before_forks,
    end_with_parent,
    free_port,
    keep_finds,
    rank_environment,
    write_finds,
)


def run_task(
    args: Sequence[str | Path], nproc: int = 1, env: Mapping[str, str] | None = None, timeout: float = LIMIT_S
) -> CompletedProcess[str]:
    """Run `python tasks/... ARGS` on `nproc` ranks; returns the output of all of them.

    As under torchrun, a rank that fails ends the others, and its exit status is the result. Raises TimeoutExpired, with
    the output so far, which ends with the stack of each rank and is printed too: pytest shows it.
    """
    command = [str(arg) for arg in args]
    before_forks()
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name, "out"), Path(name, "err")
        environment = {**(env or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "NPROC_PER_NODE": str(nproc)}
        ranks: list[int] = []
        with contextlib.ExitStack() as stack:
            if nproc > 1:
                stack.enter_context(_store(int(environment["MASTER_PORT"])))
                for rank in range(nproc):
                    variables = {**environment, **rank_environment(rank, nproc, nproc)}
                    ranks.append(_fork_rank(command, variables, out, err, timeout))
            else:
                ranks.append(_fork_rank(command, dict(env or {}), out, err, timeout))
            status = _wait(ranks, timeout)
        keep_finds(Path(name))
        said = out.read_text(), err.read_text()
    if status is None:
        print(*said, sep="\n")
        raise TimeoutExpired(command, timeout, *said)
    return CompletedProcess(command, status, *said)


@contextlib.contextmanager
def _store(port: int) -> Iterator[None]:
    """The store of the ranks in a separate process, as with torchrun: it outlives all ranks."""
    pid = os.fork()
    if pid == 0:
        end_with_parent(signal.SIGKILL)
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT_S)
        )
        while store:
            signal.pause()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork_rank(command: list[str], environment: dict[str, str], out: Path, err: Path, timeout: float) -> int:
    pid = os.fork()
    if pid == 0:
        _be_the_task(command, environment, out, err, timeout)
    return pid


def _be_the_task(command: list[str], environment: dict[str, str], out: Path, err: Path, timeout: float) -> None:
    """Run a script as the interpreter does; never returns."""
    status = 0
    before = set(sys.modules)
    try:
        end_with_parent(signal.SIGKILL)
        os.environ.update(environment)
        torch.set_num_threads(1)  # torch recreates its thread pool after a fork, which must happen in one thread
        os.chdir(ROOT)
        for path, number in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        # just before the parent's time limit; a duplicate, since the task may close its own
        faulthandler.dump_traceback_later(max(timeout - 0.5, timeout / 2), file=os.dup(2))
        logging.getLogger().handlers.clear()  # with pytest's handlers, a task would not install its own
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    write_finds(out.with_name(str(os.getpid())), before)
    os._exit(status)


def _wait(ranks: list[int], timeout: float) -> int | None:
    """The exit status of the first rank that failed, or 0; None after the timeout. All ranks have ended afterwards."""
    deadline, left = time.monotonic() + timeout, set(ranks)
    status: int | None = 0
    try:
        while left and time.monotonic() < deadline:
            for rank in sorted(left):
                ended, raw = os.waitpid(rank, os.WNOHANG)
                if ended:
                    left.remove(rank)
                    code = os.waitstatus_to_exitcode(raw)
                    if code != 0 and status == 0:
                        status = code
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                        for other in left:
                            os.kill(other, signal.SIGTERM)
            time.sleep(0.01)
    finally:
        for rank in left:
            os.kill(rank, signal.SIGKILL)
            os.waitpid(rank, 0)
    return None if left and status == 0 else status
