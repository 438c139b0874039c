"""Lines of gpu_day.py, errors as lines, and processes with a time limit that leave nothing behind."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

CUDA_ONLY = "only with CUDA"
RAISED = 3  # exit status of a part that has sent its error as a line
KILLED_S = 10.0  # in which a killed process ends, unless the driver holds it
PR_SET_CHILD_SUBREAPER = 36  # Linux: orphans below this process become its children


@dataclass(frozen=True)
class Line:
    """A result: a number with its unit, and whether it is good; None: nothing to judge. more: further values."""

    name: str
    good: bool | None
    value: float | None = None
    unit: str = ""
    note: str = ""
    more: dict[str, Any] = field(default_factory=dict)


Lines = Iterator[Line]


@dataclass(frozen=True)
class Stage:
    """Lines of a part, `right` or `fast`; seconds that they should take on an H100, and their limit."""

    part: str
    run: Callable[[], Lines]
    expected: float
    limit: float


def tried(name: str, look: Callable[[], Lines]) -> Lines:
    """The lines of `look`. An error becomes another line, named `name`, so that later measurements still run."""
    try:
        yield from look()
    except (Exception, SystemExit) as error:  # kernels, libraries and rejected configurations raise many types
        traceback.print_exc()
        yield Line(name, False, note=first_line(error))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_line(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"


def device() -> torch.device:
    """The GPU, or the CPU if there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def clock() -> float:
    """Seconds, after waiting for the device to finish."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], object], times: int = 1) -> float:
    """The average time of a call in seconds."""
    start = clock()
    for _ in range(times):
        function()
    return (clock() - start) / times


class Part:
    """A function in a process and a session of its own, whose results arrive while it runs; its output goes to a file.

    `run()` yields its results. Nothing that it has started outlives `end()`, except for processes of another user.
    """

    def __init__(self, run: Callable[[], Iterator[Any]], log: Path) -> None:
        # a fork need not import again; one of a process that has initialized CUDA could not use it
        context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
        self.reader, writer = context.Pipe(duplex=False)
        self.log, self.process = log, context.Process(target=_child, args=(run, writer, log))
        self.process.start()
        self.began = time.monotonic()
        writer.close()

    def results(self, limit: float) -> Iterator[Any]:
        """What arrives within `limit` seconds, until the process ends; then `status` is its exit status, or None."""
        end = time.monotonic() + limit
        # neither the pipe's end nor multiprocessing's sentinel tells that it has ended: its children may hold both
        while self.process.is_alive() and (left := end - time.monotonic()) > 0:
            yield from self._arrived(min(left, 0.1))
        self.status = self.process.exitcode
        self.end()
        yield from self._arrived(0)

    def _arrived(self, wait: float) -> Iterator[Any]:
        with contextlib.suppress(EOFError, OSError):
            while self.reader.poll(wait):
                yield self.reader.recv()
                wait = 0
            return
        time.sleep(wait)  # the process has closed the pipe and is about to end

    def end(self) -> None:
        """Kill the process and all that it has started and left; do not wait for one that cannot end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()
        self.process.join(KILLED_S)


def adopt_orphans() -> None:
    """Have `kill_orphans` find processes of a part that are in sessions of their own, such as torchrun's ranks."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans() -> int:
    """Kill all processes below this one until none is left, or for KILLED_S; returns how many have ended. To be called
    while no part runs.
    """
    killed, end = 0, time.monotonic() + KILLED_S
    while (pids := _children()) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                killed += os.waitpid(pid, os.WNOHANG)[0] == pid
        time.sleep(0.02)
    return killed


def _children() -> list[int]:
    """The processes whose parent this one is."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # the name, in parentheses, may contain anything; the state and the parent follow it
            parent = file.read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid():
                found.append(int(file.parent.name))
    return found


def _child(run: Callable[[], Iterator[Any]], writer: Connection, log: Path) -> NoReturn:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    status = 0
    try:
        for result in run():
            writer.send(result)
    except BaseException as error:
        traceback.print_exc()
        writer.send(Line("the stage", False, note=first_line(error)))
        status = RAISED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of process groups and compilers would keep the interpreter from ending
