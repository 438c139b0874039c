"""Process exit: the final message, on the terminal and in torchrun's report, and the exit status."""

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
MARKS = "PHALANX_MARKS"  # the launcher's folder, in which each rank has a file from `begin` to `end`
# A launcher that receives SIGTERM creates this file there; without it, ranks are stopped because nodes come or go.
TOLD = "told"
STORE = "PHALANX_STORE"  # the address of a job's store whose nodes have a torchrun each (IN_PLACE=1)
_mark: Path | None = None
_printed: set[str] = set()  # lines that this process has printed
_role = ""  # of this process, if ranks have roles
_leads: bool | None = None  # None: True on rank 0 only
_first: bool | None = None  # None: True on rank 0 only
_format_warning = warnings.formatwarning
_leave = os._exit  # the original, which `begin` may replace
hide: Callable[[str], str] = str  # removes secrets from everything printed or reported; set by `hide_with`
# Takes the place of a signal's number after `phalanx stop`. No launcher sends it (train.sh ignores it).
REQUEST = signal.SIGUSR2


def _no_copy(words: str, last: bool) -> None:
    """The default of `copy`, which keeps no copy."""


# Receives lines that do not pass through sys.stdout or sys.stderr, and whether they may be this process's last.
copy: Callable[[str, bool], None] = _no_copy


class Stopped(RuntimeError):
    """Raised on all ranks at once to stop the job, as signal `number` demands; its message says what was saved."""

    def __init__(self, number: int, kept: str = "") -> None:
        cause = f"stopped by {'phalanx stop' if number == REQUEST else signal.Signals(number).name}"
        if number != REQUEST and ":" in os.environ.get("NNODES", "") and not told_to_stop():
            cause = "nodes come or go: starting again"
        super().__init__(f"{cause}{kept}")
        self.number = number

    @property
    def status(self) -> int:
        """The exit status, 128 + the signal's number as in a shell; a request counts as SIGTERM."""
        return 128 + (signal.SIGTERM if self.number == REQUEST else self.number)


def told_to_stop(patience_s: float = 0.0) -> bool:
    """Whether the launcher has noted within `patience_s` that it was told to stop; True if it takes no notes."""
    deadline = time.monotonic() + patience_s
    while _mark is not None and not _mark.with_name(TOLD).exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


def in_place() -> bool:
    """Whether ranks go on in their processes when others are lost (see phalanx.run.in_place)."""
    return os.environ.get("IN_PLACE") == "1"


def join_nodes() -> None:
    """Where each node has a torchrun of its own, number its ranks among those of all nodes, by NODE_RANK. Those of a
    spare node have numbers from WORLD_SIZE on.
    """
    env = os.environ
    store = env.pop(STORE, "")  # child processes are not ranks
    if store:
        node, local = int(env["NODE_RANK"]), int(env["LOCAL_WORLD_SIZE"])
        world = int(env["NNODES"]) * local
        address, _, port = store.rpartition(":")
        env.update(RANK=str(node * local + int(env["LOCAL_RANK"])), WORLD_SIZE=str(world))
        env.update(GROUP_RANK=str(node), GROUP_WORLD_SIZE=env["NNODES"], MASTER_ADDR=address, MASTER_PORT=port)
        env["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # no rank keeps the store


def rank() -> int:
    """This process's rank, from the launcher's environment; no process group is needed."""
    return int(os.environ.get("RANK", "0"))


def leads() -> bool:
    """Whether this process logs for the whole job: rank 0, unless `take_role` has chosen another rank."""
    return rank() == 0 if _leads is None else _leads


def is_first() -> bool:
    """Whether this process is the first of its role, or of all ranks without roles; the others would fail alike."""
    return rank() == 0 if _first is None else _first


def take_role(role: str, *, first: bool, lead: bool) -> None:
    """Set this process's role; it is the `first` rank of the role or not, and leads the job or not."""
    global _role, _leads, _first
    _role, _leads, _first = role, lead, first
    _set_levels(lead, logging.INFO)


def speak_for_role() -> None:
    """Enable the warnings of each role's first rank, once roles do different things."""
    if not leads():
        _set_levels(is_first(), logging.NOTSET)


def _set_levels(enabled: bool, level: int) -> None:
    """Log warnings of all libraries, and records of Phalanx from `level` on; only errors if not `enabled`."""
    logging.getLogger().setLevel(logging.WARNING if enabled else logging.ERROR)
    logging.getLogger("phalanx").setLevel(level if enabled else logging.NOTSET)


def place() -> str:
    """This process, for messages: `rank 3 on node-b`, or `rank 3 on node-b (actor)` if ranks have roles."""
    return f"{place_of(rank())} ({_role})" if _role else place_of(rank())


def place_of(number: int) -> str:
    """A rank on this machine, for messages."""
    return f"rank {number} on {socket.gethostname()}"


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends; on Linux only.

    Otherwise the children of a killed launcher would go on writing to a folder that the next job uses.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def begin() -> None:
    """Create a mark for the launcher, which `end` removes or completes with a status other than 0: a rank that exits
    with status 0 and leaves its mark behind has not finished its job. Plain torchrun does not check marks, so
    os._exit itself is replaced under it.
    """
    global _mark
    folder = os.environ.pop(MARKS, None)  # child processes of this one are not ranks
    if folder is None and "TORCHELASTIC_RUN_ID" in os.environ:
        os._exit = partial(_early_exit, os.getpid())
    elif folder is not None:
        _mark = Path(folder, os.environ["LOCAL_RANK"])  # not RANK, which may change after a restart
        _mark.write_text(os.environ["RANK"])


def _early_exit(rank_pid: int, status: int) -> NoReturn:
    """Replaces os._exit in a rank and the processes that it forks: a rank that calls it has not finished its job."""
    if os.getpid() != rank_pid:
        _leave(status)
    caller = sys._getframe(1)
    where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    words = f"error: {place()} ended before its job was done, by os._exit({status}) at {where}"
    end(status or 1, words, words)


def hide_with(function: Callable[[str], str]) -> None:
    """Have `function` remove secrets from all lines and reports, including records that libraries log by their own
    handlers, warnings, and exceptions in threads.
    """
    global hide
    hide = function
    logging.setLogRecordFactory(_Record)
    warnings.formatwarning = _hidden_warning
    threading.excepthook = _thread_crash


class _Record(logging.LogRecord):
    """A log record without secrets, whichever handler formats it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = hide("".join(traceback.format_exception(*self.exc_info)).rstrip())

    def getMessage(self) -> str:
        return hide(super().getMessage())


def _hidden_warning(*args: Any, **kwargs: Any) -> str:
    return hide(_format_warning(*args, **kwargs))


def _thread_crash(crash: threading.ExceptHookArgs) -> None:
    """Print the exception that ended a thread, as Python does by default, without secrets."""
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
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, f"{words}\n".encode(errors="backslashreplace"))


def show(text: str) -> int:
    """Print to stdout, whose reader may have left, as `head -1` does; returns the exit status 0."""
    try:
        print(text.removesuffix("\n"), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the remaining output at exit
    return 0


def show_mistake(error: Exception) -> int:
    """Print a mistake of the user as one line; returns the status of the command that it ends."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


def end(status: int, report: str | None = None, words: str | None = None, *, restart: bool = True) -> NoReturn:
    """Exit without waiting for this process's threads, some of which may never end.

    `report` is printed by torchrun at the end, as the failure of this rank; `words` are printed now. With
    restart=False, phalanx.run.launch sees the status but torchrun sees 0, because otherwise it might restart the ranks.
    """
    if words is not None:
        say(words)
    report = None if report is None else hide(report)
    if report is not None and report not in _printed:
        copy(report, True)
    # torch would write this file by its decorator @record, which prints a traceback and waits for threads. torchrun
    # shows the `message` of the rank with the earliest timestamp.
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None and report is not None:
        lines = report.splitlines()
        summary = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"  # the rank, and its exception
        stamp = {"py_callstack": report, "timestamp": str(int(time.time())), "told": report in _printed}
        message = {"message": summary, "extraInfo": stamp}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"message": message}, file)
        except OSError as error:  # a full disk must not hide the original error
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
