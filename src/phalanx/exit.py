"""The end of a process: its last word, on the terminal and in torchrun's report, and its status."""

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1  # of Linux's prctl
MARKS = "PHALANX_MARKS"  # a folder of the launcher's, in which a rank has a file from `begin` to `end`
TOLD = "told"  # the file there of a launcher that was told to stop: else its ranks stop because nodes come or go
_mark: Path | None = None
_printed: set[str] = set()  # lines that this process has printed
_role = ""  # of this process, where ranks have roles
_leads: bool | None = None  # None: as rank 0 does
_first: bool | None = None
_format_warning = warnings.formatwarning
_leave = os._exit  # `begin` may replace it
hide: Callable[[str], str] = str  # takes secrets out of what is printed and reported; `hide_with` sets it
# In place of a signal's number: `phalanx stop` has asked. No launcher sends it (train.sh ignores it).
REQUEST = signal.SIGUSR2


def _uncopied(words: str, last: bool) -> None:
    """Nobody keeps a copy."""


# Gets the lines that do not pass through sys.stdout or sys.stderr, and whether they may be this process's last.
copy: Callable[[str, bool], None] = _uncopied


class Stopped(RuntimeError):
    """The job stops on all ranks at once, as signal `number` asked; its message says what is kept."""

    def __init__(self, number: int, kept: str = "") -> None:
        cause = f"stopped by {'phalanx stop' if number == REQUEST else signal.Signals(number).name}"
        if (
            number != REQUEST
            and ":" in os.environ.get("NNODES", "")
            and _mark is not None
            and not _mark.with_name(TOLD).exists()
        ):
            cause = "nodes come or go: starting again"
        super().__init__(f"{cause}{kept}")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status: that of a shell's command that the signal ends; of a request, as of SIGTERM."""
        return 128 + (signal.SIGTERM if self.number == REQUEST else self.number)


def rank() -> int:
    """This process's rank, by the launcher's environment: there need be no process group yet."""
    return int(os.environ.get("RANK", "0"))


def leads() -> bool:
    """Whether this process speaks for the job: rank 0, unless `take_role` has set another one."""
    return rank() == 0 if _leads is None else _leads


def is_first() -> bool:
    """Whether this process is the first of those that do the same and fail alike: of its role, where there are any."""
    return rank() == 0 if _first is None else _first


def take_role(role: str, *, first: bool, lead: bool) -> None:
    """Be the first rank of a role or not, and the one that speaks for the job or not, in place of rank 0."""
    global _role, _leads, _first
    _role, _leads, _first = role, lead, first
    _log(lead, logging.INFO)


def speak_for_role() -> None:
    """Let warnings of each role's first rank be heard, once roles do different things."""
    if not leads():
        _log(is_first(), logging.NOTSET)


def _log(aloud: bool, level: int) -> None:
    logging.getLogger().setLevel(logging.WARNING if aloud else logging.ERROR)
    logging.getLogger("phalanx").setLevel(level if aloud else logging.NOTSET)


def place() -> str:
    """This process, for a message: `rank 3 on node-b`, and `(actor)` where that is its role."""
    return f"{place_of(rank())} ({_role})" if _role else place_of(rank())


def place_of(number: int) -> str:
    """A rank of this machine, for a message."""
    return f"rank {number} on {socket.gethostname()}"


def end_with_parent() -> None:
    """Let the kernel kill this process once the thread that started it is gone; on Linux only.

    A launcher that is killed would leave its children behind, which would go on in a folder that the next job uses.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def begin() -> None:
    """Leave a mark for the launcher until `end`, which adds a status that is not 0: a rank that ends with status 0 and
    leaves its mark has not done its job. A torchrun that was started without the launcher looks for no marks, so there
    os._exit itself is replaced.
    """
    global _mark
    folder = os.environ.pop(MARKS, None)  # what this process starts is no rank
    if folder is None and "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit = partial(_left, os.getpid())
    elif folder is not None:
        _mark = Path(folder, os.environ["LOCAL_RANK"])  # a rank that is started again may have another number
        _mark.write_text(os.environ["RANK"])


def _left(rank_pid: int, status: int) -> NoReturn:
    """The os._exit of a rank and of the processes that it forks: a rank that calls it has not done its job."""
    if os.getpid() != rank_pid:
        _leave(status)
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    words = f"error: {place()} ended before its job was done, by os._exit({status}) at {where}"
    end(status or 1, words, words)


def hide_with(function: Callable[[str], str]) -> None:
    """Let a function take secrets out of every line and report, also out of what libraries log by handlers of their
    own, of warnings, and of exceptions in threads.
    """
    global hide
    hide = function
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = _warning
    threading.excepthook = _thread_crash


class _Record(logging.LogRecord):
    """A log record without secrets, whichever handler formats it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = hide("".join(traceback.format_exception(*self.exc_info)).rstrip())

    def getMessage(self) -> str:
        return hide(super().getMessage())


def _warning(*args: Any, **kwargs: Any) -> str:
    return hide(_format_warning(*args, **kwargs))


def _thread_crash(crash: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, as Python does by itself."""
    if crash.exc_type is SystemExit:
        return
    name = "" if crash.thread is None else crash.thread.name
    lines = traceback.format_exception(crash.exc_type, crash.exc_value, crash.exc_traceback)
    say(f"{place()}: an exception in the thread {name}:\n{''.join(lines).rstrip()}")


def say(words: str) -> None:
    """Print a line to the terminal."""
    words = hide(words)
    _printed.add(words)
    copy(words, True)
    # Not through sys.stderr: torch.distributed redirects it while its excepthook runs.
    with contextlib.suppress(OSError):  # nobody reads it any more: the terminal is closed
        os.write(2, f"{words}\n".encode(errors="backslashreplace"))


def show(text: str) -> int:
    """Print to stdout, to whoever still reads, as `head -1` does not; returns the exit status."""
    try:
        print(text.removesuffix("\n"), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed once more at the end
    return 0


def end(status: int, report: str | None = None, words: str | None = None, *, restart: bool = True) -> NoReturn:
    """End this process without waiting for its threads, some of which may never end.

    `report` is what torchrun prints last, as the failure of this rank; `words` are printed now. Without `restart` only
    phalanx.launch sees the status, and torchrun 0: it would start the ranks again, where it may.
    """
    if words is not None:
        say(words)
    report = None if report is None else hide(report)
    if report is not None and report not in _printed:
        copy(report, True)
    # Torch's own way to this file is the decorator @record, which ends with a traceback and a wait
    # for threads. torchrun shows the `message` of the rank with the earliest stamp.
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and report is not None:
        lines = report.splitlines()
        summary = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"  # whose error it is, and what
        stamp = {"py_callstack": report, "timestamp": str(int(time.time())), "told": report in _printed}
        message = {"message": summary, "extraInfo": stamp}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": message}, file)
        except OSError as error:  # a full disk must not hide the error itself
            say(f"{place()}: {path}: {error}")
    if _mark is not None:
        if status == 0:
            _mark.unlink(missing_ok=True)
        else:
            with contextlib.suppress(OSError):  # a full disk
                _mark.write_text(f"{rank()} {status}")
                status = status if restart else 0
    with contextlib.suppress(OSError):
        sys.stdout.flush()  # os._exit flushes nothing
    _leave(status)
