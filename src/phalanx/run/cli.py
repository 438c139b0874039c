"""The command line that all tasks share: --help, --plan, the configuration, and error reporting.

Every rank parses the same command line and may fail in the same way, so that 32 ranks would print 32 tracebacks.
Instead, a user's mistake is one line, printed by rank 0; any other error is printed by the rank on which it occurred
first, and by torchrun at the end of its report.

No heavy library is imported at the top, so that --help and mistakes are printed before torch is loaded.
"""

import copy
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO, TypeVar

from phalanx.config.load import help_text
from phalanx.config.messages import ConfigError, UnknownKeys, reason
from phalanx.config.secrets import hide
from phalanx.exit import (
    REQUEST,
    Stopped,
    begin,
    end,
    end_with_parent,
    hide_with,
    in_place,
    is_first,
    join_nodes,
    leads,
    place,
    rank,
    say,
    show,
)
from phalanx.garbage import uncollected
from phalanx.run.rules import load_config

if TYPE_CHECKING:
    from phalanx.run.watchdog import Watch

T = TypeVar("T")
log = logging.getLogger(__name__)

# Silence libraries that print at import or whenever they load something. They read these variables at import, which
# happens after this module is imported.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)

HELP = "--help: this text"
PLAN = "--plan [nnodes=4] [nproc=8] [gpu_memory_gb=80]: count what the job needs on that cluster, without training"
RUN = "run "  # the names of threads that are runs of a sweep begin so
LONGEST = 2000  # characters of an error
PLAN_WORDS = ("nnodes", "nproc_per_node", "nproc", "gpu_memory_gb")  # accepted only together with --plan
OF_TIMES = ("gpu", "gpu_hour_price", "rollout_s", "inference_s", "actor_s")  # when plans also guessed times


def parse(
    schema: type[T],
    description: str,
    argv: list[str] | None = None,
    plan: Callable[[T, dict[str, str]], str] | None = None,
    check: Callable[[T], None] | None = None,
) -> T:
    """Parse `[config.yaml] [key=value ...]` and return the configuration.

    With --help it prints the help and exits; with --plan it prints the result of `plan`, called with the configuration
    and the given PLAN_WORDS, and exits. With PHALANX_CHECK=1, which phalanx.run.launch sets before it starts ranks, it
    runs `check`, which raises ValueError for mistakes that can be found in the input files without torch, and exits. A
    mistake ends the process with status 2 and one line, printed only by rank 0.
    """
    checking = os.environ.get("PHALANX_CHECK") == "1"
    start_process(quiet=checking)
    argv = sys.argv[1:] if argv is None else argv
    asked: dict[str, str] | None = None
    if plan is not None:
        argv, asked = _plan_words(argv)
    words = [word for word in argv if word not in ("-h", "--help")]
    wants_help = len(words) < len(argv)
    options = [word for word in words if word.startswith("-")]
    path = words.pop(0) if words and "=" not in words[0] else None
    try:
        if options:
            usage = "[config.yaml] [key=value ...], or --help"
            raise ConfigError(f"unknown option {options[0]}; expected {usage}")
        if wants_help:
            if rank() == 0:
                known = (HELP, PLAN) if plan is not None else (HELP,)
                # the help depends on file and overrides, since the chosen algorithm and rewards add keys
                show(help_text(schema, description, path, words, known))
            sys.exit(0)
        begin()
        with uncollected():  # the chosen algorithm imports torch
            config = load_config(schema, path, words)
        if checking:
            if check is not None:
                check(config)
            end(0)  # with torch loaded, the interpreter's own shutdown takes as long as the check
    except ValueError as error:
        _report_mistake(error, status=2)
    if plan is None or asked is None:
        return config
    try:
        text = plan(config, asked)
    except ValueError as error:
        _report_mistake(error, status=2)
    if rank() == 0:
        show(text)
    sys.exit(0)


def start_process(*, quiet: bool = False) -> None:
    """Prepare a process to be a rank: its end with its launcher's, its log, and secrets that are left out of it.

    quiet: log only errors, as do all ranks but the first, which logs for all; their errors are printed by `fail`.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
        join_nodes()
    hide_with(hide)
    level = logging.WARNING if rank() == 0 and not quiet else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s", handlers=[_Terminal()])


class _Terminal(logging.StreamHandler[TextIO]):
    """Writes log records to stderr; all but INFO records are prefixed with their level."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # the progress line replaces sys.stderr, to print above itself
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        words = hide(super().format(record))
        if record.threadName is not None and record.threadName.startswith(RUN):
            words = f"{record.threadName.removeprefix(RUN)}: {words}"
        return words if record.levelno == logging.INFO else f"{record.levelname}: {words}"


def _leave_folder() -> None:
    """Release the job's lock on output_dir; otherwise the job would look crashed, and `phalanx stop` would wait."""
    module = sys.modules.get("phalanx.run.folder_lock")  # not imported here, see _current_watch
    if module is not None:
        module.release()


def _plan_words(argv: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """Split the command line into the job's arguments and the PLAN_WORDS, None without --plan (or plan=true)."""
    planning = False
    given: dict[str, str] = {}
    arguments: list[str] = []
    for word in argv:
        key, equals, value = word.partition("=")
        if word in ("--plan", "plan=true"):
            planning = True
        elif equals and key in PLAN_WORDS:
            given[key] = value
        elif equals and key in OF_TIMES:
            fail(f"{word}: --plan counts memory, messages and operations, not times; leave {key} out", status=2)
        else:
            arguments.append(word)
    if given and not planning:
        key, value = next(iter(given.items()))
        hint = "the size of a job is set by environment variables, such as NNODES=2"
        fail(f"{key}={value} is only for --plan; {hint}", status=2)
    return arguments, given if planning else None


def run(build: Callable[[T], Callable[[], None]], config: T) -> NoReturn:
    """Build a job, run it and exit.

    A ValueError of `build` (data, model folder, rewards, batch sizes) is a user's mistake: one line and status 2. A
    JobError, of `build` or of the job itself, is one line and status 1. Any other exception is printed with its
    traceback; PHALANX_TRACEBACK=1 prints the traceback of all. A job that is told to stop exits with
    128 + the signal's number.
    """
    faulthandler.enable()  # print the stack after a crash in C++, which would otherwise be silent
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # until the watch handles this signal
    sys.excepthook = _report_crash
    if rank() == 0:
        logging.getLogger("phalanx").setLevel(logging.INFO)  # show progress before the first step
    log.info("loading the libraries")
    if in_place():
        _run_in_place(build, config)
    else:
        _run_job(build, config)
    # Everything is written and closed. Threads of workers and process groups could outlive the interpreter's teardown,
    # which has been seen to abort a rank ("terminate called without an active exception"); `end` skips the teardown.
    end(0)


def _run_in_place(build: Callable[[T], Callable[[], None]], config: T) -> None:
    """Build and run a job, again after each loss of other ranks."""
    from phalanx.run.in_place import drop_groups, ended, enter, survives
    from phalanx.types import JobError

    done = False
    try:
        enter()
        while not done:
            logging.getLogger("phalanx").setLevel(logging.INFO if rank() == 0 else logging.NOTSET)
            try:
                _run_job(build, copy.deepcopy(config))
                done = True
            except (JobError, Stopped):
                raise
            except RuntimeError as error:
                if not survives(error, _from_a_collective(error)):
                    raise
            gc.collect()  # the job that has ended, whose frames the exception held
            drop_groups()
        ended(0)
    except ConfigError as error:
        _report_mistake(error, status=1, restart=False)


def _run_job(build: Callable[[T], Callable[[], None]], config: T) -> None:
    from phalanx.types import JobError

    try:
        with _losses_told(ValueError), uncollected():  # or until the job has a world
            job = build(config)
    except (ValueError, SystemExit) as error:  # SystemExit comes from user code: Phalanx does not call sys.exit here
        _leave_folder()
        _report_mistake(error, status=2)
    except JobError as error:  # a damaged checkpoint, which an evaluation loads here
        _leave_folder()
        _report_mistake(error, status=1)
    # A ValueError during training is a bug, which `build` should have caught, and keeps its traceback.
    try:
        with _losses_told():
            job()
    except (JobError, SystemExit) as error:
        _leave_folder()
        _report_mistake(error, status=1)
    except Stopped as stop:
        _leave_folder()
        if in_place():
            from phalanx.run.in_place import ended

            ended(stop.status)
        # in place, launchers of other nodes were not told: they would start their ranks again
        restart = stop.number != REQUEST and not in_place()
        end(stop.status, str(stop), str(stop) if leads() else None, restart=restart)


@contextmanager
def _losses_told(*mistakes: type[Exception]) -> Iterator[None]:
    """Within the block, an exception is a DistError if ranks were lost before it: NCCL's collectives that were aborted
    leave arbitrary results instead of an error, and no group for the next ones. `mistakes` come from nothing arbitrary.
    """
    try:
        yield
    except Exception as error:
        watch = _current_watch()
        if watch is None or watch.sever is None:
            raise
        from torch.distributed import DistError

        from phalanx.run.generations import Regroup

        known = isinstance(error, (Stopped, DistError, Regroup, *mistakes)) or _from_a_collective(error)
        if not watch.goes_on(wait=not known):
            raise
        raise DistError("other ranks were lost") from error


def fail(text: str, status: int, lines: int = 1, *, restart: bool = True) -> NoReturn:
    """Print a message as so many lines and exit at once, without waiting for worker threads. restart: see `end`."""
    message = "\n  ".join(map(_one_line, hide(text).split("\n", lines - 1)))
    if not is_first():
        # Let the first rank print first. If it fails too, as with any mistake in the configuration, its launcher
        # ends the other ranks by SIGTERM while they wait here, before they repeat the message. So the signals must
        # end the process whatever handlers were installed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)
    prefix = "error" if is_first() else f"error on rank {rank()}"
    _end_with(f"{prefix}: {message}", status, restart=restart)


def _one_line(message: str) -> str:
    """Collapse whitespace, escape unprintable characters and truncate a message for the terminal."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(message.split()))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…"


def _report_mistake(error: BaseException, status: int, *, restart: bool = True) -> NoReturn:
    """Report a user's mistake or a JobError and exit."""
    if os.environ.get("PHALANX_TRACEBACK") == "1":
        say(traceback.format_exc())
    text = reason(error) if isinstance(error, SystemExit) else str(error)
    fail(text, status, lines=text.count("\n") + 1 if isinstance(error, UnknownKeys) else 1, restart=restart)


def _report_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an unexpected exception and exit (sys.excepthook)."""
    if kind is KeyboardInterrupt:
        end(128 + signal.SIGINT, f"{place()}: interrupted", "interrupted" if leads() else None)
    watch = _current_watch()
    text = "".join(traceback.format_exception(kind, error, trace))
    report = f"{place()}:\n{hide(text).rstrip()}"
    # A failed collective reveals only that a peer is gone; the watch may know which one, and why.
    cause = watch.explain() if watch is not None and _from_a_collective(error) else None
    _end_with(report if cause is None else cause, status=1)


def report_uncaught() -> None:
    """Report exceptions that a program of the user's own does not catch as those of a task, so that all ranks end."""
    sys.excepthook = _report_uncaught


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    from phalanx.types import JobError

    if isinstance(error, Stopped):
        end(error.status, str(error), str(error) if leads() else None, restart=error.number != REQUEST)
    if isinstance(error, ConfigError | JobError):
        _report_mistake(error, status=1 if isinstance(error, JobError) else 2)
    _report_crash(kind, error, trace)


def _from_a_collective(error: BaseException) -> bool:
    """True if an error may be the consequence of another rank's error."""
    # gloo raises plain RuntimeErrors, which only their messages identify
    signs = ("gloo", "NCCL", "peer", "socket")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _end_with(report: str, status: int, *, restart: bool = True) -> NoReturn:
    """Exit with an error, or with that of another rank if one was reported earlier."""
    watch, first = _current_watch(), True
    if watch is not None:
        report, first = watch.tell(report)
    if first:
        say(report)
    if watch is not None:
        watch.linger()  # rank 0 hosts the store in which the others find the error
    end(status, report, None, restart=restart)


def _current_watch() -> "Watch | None":
    """This rank's watch, or None before it has started."""
    # Not imported here: if the module is not loaded there is no watch, and importing it would load torch.
    module = sys.modules.get("phalanx.run.watchdog")
    return None if module is None else module.current
