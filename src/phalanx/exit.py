"""The end of a process: its last word, on the terminal and in torchrun's report, and its status."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # of Linux's prctl
_said: set[str] = set()  # by this process, on the terminal


class Stopped(RuntimeError):
    """The job stops on all ranks at once, as signal `number` asked; its message says what is kept."""

    def __init__(self, number: int, kept: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{kept}")
        self.number = number


def rank() -> int:
    """This process's rank, by the launcher's environment: there need be no process group yet."""
    return int(os.environ.get("RANK", "0"))


def place() -> str:
    """This process, for a message: `rank 3 on node-b`."""
    return place_of(rank())


def place_of(number: int) -> str:
    """A rank of this machine, for a message."""
    return f"rank {number} on {socket.gethostname()}"


def end_with_parent() -> None:
    """Let the kernel kill this process once the thread that started it is gone; on Linux only.

    A launcher that is killed would leave its children behind, which would go on in a folder that the next job uses.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def say(words: str) -> None:
    """Print a line to the terminal."""
    _said.add(words)
    # Not through sys.stderr: torch.distributed redirects it while its excepthook runs.
    with contextlib.suppress(OSError):  # nobody reads it any more: the terminal is closed
        os.write(2, f"{words}\n".encode(errors="backslashreplace"))


def end(status: int, report: str | None = None, words: str | None = None) -> NoReturn:
    """End this process without waiting for its threads, some of which may never end.

    `report` is what torchrun prints last, as the failure of this rank; `words` are printed now.
    """
    if words is not None:
        say(words)
    # Torch's own way to this file is the decorator @record, which ends with a traceback and a wait
    # for threads. torchrun shows the `message` of the rank with the earliest stamp.
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and report is not None:
        lines = report.splitlines()
        summary = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"  # whose error it is, and what
        stamp = {"py_callstack": report, "timestamp": str(int(time.time())), "told": report in _said}
        message = {"message": summary, "extraInfo": stamp}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": message}, file)
        except OSError as error:  # a full disk must not hide the error itself
            say(f"{place()}: {path}: {error}")
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # os._exit flushes nothing
    os._exit(status)
