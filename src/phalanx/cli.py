"""The command line that all tasks share: --help, --plan, the configuration, and errors told once.

Every rank parses the same command line and may fail in the same way, so that 32 ranks would print
32 tracebacks. A mistake of the user is one line, printed by rank 0; any other error is printed by
the rank that had it first, and by torchrun at the end of its report.

Nothing heavy is imported at the top: a mistake and --help are told before torch is loaded.
"""

import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO, TypeVar

from phalanx.config import ConfigError, help_text, load
from phalanx.config.messages import reason
from phalanx.config.secrets import hide
from phalanx.exit import (
    REQUEST,
    Stopped,
    begin,
    end,
    end_with_parent,
    hide_with,
    is_first,
    leads,
    place,
    rank,
    say,
    show,
)
from phalanx.garbage import uncollected

if TYPE_CHECKING:
    from phalanx.distributed.watchdog import Watch

T = TypeVar("T")
log = logging.getLogger(__name__)

# What libraries say at import or at every load is not for the user of a task. They read these when
# they are imported, which the task does after this module.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)

HELP = "--help: this text"
PLAN = (
    "--plan [nnodes=4] [nproc=8] [gpu=H100] [gpu_memory_gb=80] [gpu_hour_price=2.5] "
    "[rollout_s=30 inference_s=3 actor_s=10]: what the job would be on that cluster; nothing is trained"
)
LONGEST = 2000  # characters of an error
# known only beside --plan
PLAN_SECONDS = ("rollout_s", "inference_s", "actor_s")  # of the phase of each role, if all ranks did it
PLAN_WORDS = ("nnodes", "nproc_per_node", "nproc", "gpu", "gpu_memory_gb", "gpu_hour_price", *PLAN_SECONDS)


def parse(
    schema: type[T],
    description: str,
    argv: list[str] | None = None,
    plan: Callable[[T, dict[str, str]], str] | None = None,
    check: Callable[[T], None] | None = None,
) -> T:
    """The configuration from `[config.yaml] [key=value ...]`.

    With --help it prints the help and exits; with --plan, what `plan` makes of the configuration and of the PLAN_WORDS
    that are given. With PHALANX_CHECK=1, by which phalanx.launch asks before it starts a rank, it runs `check`, which
    raises ValueError for what the files say without torch, and goes no further. A mistake ends the process with status
    2 and one line, printed only by rank 0.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    checking = os.environ.get("PHALANX_CHECK") == "1"
    # rank 0 speaks for all; what only another rank sees is an error, and errors are told by `fail`
    hide_with(hide)
    level = logging.WARNING if rank() == 0 and not checking else logging.ERROR
    logging.basicConfig(level=level, format="%(message)s", handlers=[_Terminal()])
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
                # with the file and the words, since a named algorithm or reward adds its keys
                show(help_text(schema, description, path, words, known))
            sys.exit(0)
        begin()
        with uncollected():  # a named algorithm brings torch
            config = load(schema, path, words)
        if checking:
            if check is not None:
                check(config)
            end(0)  # the interpreter's own end takes as long as the check where torch is loaded
    except ValueError as error:
        _tell(error, status=2)
    if plan is None or asked is None:
        return config
    try:
        text = plan(config, asked)
    except ValueError as error:
        _tell(error, status=2)
    if rank() == 0:
        show(text)
    sys.exit(0)


class _Terminal(logging.StreamHandler[TextIO]):
    """Log lines on stderr: what a job says of its progress as it is, and the rest with its level."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr  # that of now: while a line shows the progress, it prints above that line
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        words = hide(super().format(record))
        return words if record.levelno == logging.INFO else f"{record.levelname}: {words}"


def _leave_folder() -> None:
    """Free the output_dir that the job has taken: it would count as a dead job's, and `phalanx stop` would wait."""
    module = sys.modules.get("phalanx.training.folder_lock")  # as in _watch
    if module is not None:
        module.release()


def _plan_words(argv: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """The command line without --plan (or plan=true) and its words; these words, None without it."""
    asked = False
    given: dict[str, str] = {}
    rest: list[str] = []
    for word in argv:
        key, equals, value = word.partition("=")
        if word in ("--plan", "plan=true"):
            asked = True
        elif equals and key in PLAN_WORDS:
            given[key] = value
        else:
            rest.append(word)
    if given and not asked:
        key, value = next(iter(given.items()))
        hint = "a job's own size is its launcher's, such as NNODES=2"
        fail(f"{key}={value} goes with --plan; {hint}", status=2)
    return rest, given if asked else None


def run(build: Callable[[T], Callable[[], None]], config: T) -> NoReturn:
    """Build a job, run it and exit; a mistake of the user ends it with one line.

    A ValueError of `build` (data, model folder, rewards, batch arithmetic) is such a mistake, status 2, and so is a
    JobError of the job itself, status 1. Anything else keeps its traceback; PHALANX_TRACEBACK=1 shows it for all. A job
    that was told to stop ends with 128 + the signal's number.
    """
    faulthandler.enable()  # a stack for a crash in C++, which would else end without a word
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # until the watch listens to it
    sys.excepthook = _crash
    if rank() == 0:
        logging.getLogger("phalanx").setLevel(logging.INFO)  # what the job does before its first step
    log.info("loading the libraries")
    from phalanx.types import JobError

    try:
        with uncollected():  # or until the job has a world
            job = build(config)
    except (ValueError, SystemExit) as error:  # nothing of ours leaves by sys.exit
        _leave_folder()
        _tell(error, status=2)
    # Not ValueError again: what `build` let pass and training stumbles over is an error of ours,
    # which needs its traceback.
    try:
        job()
    except (JobError, SystemExit) as error:
        _leave_folder()
        _tell(error, status=1)
    except Stopped as stop:
        _leave_folder()
        end(stop.status, str(stop), str(stop) if leads() else None, restart=stop.number != REQUEST)
    # All is written and closed. Worker threads and those of process groups would outlive the interpreter's teardown; a
    # rank was seen to abort ("terminate called without an active exception"), which this most likely prevents.
    end(0)


def fail(message: str, status: int) -> NoReturn:
    """Print one line and exit at once, without waiting for worker threads."""
    if not is_first():
        # The first rank speaks first. Where it fails as well, as with any mistake in the configuration, its
        # launcher ends the others while they wait here, before they repeat it: by SIGTERM, so that
        # must end them, whatever handlers there are.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)
    prefix = "error" if is_first() else f"error on rank {rank()}"
    _end_with(f"{prefix}: {_one_line(hide(message))}", status)


def _one_line(message: str) -> str:
    """A message as a terminal can show it, whatever the files and the user's code have put into it."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in " ".join(message.split()))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…"


def _tell(error: BaseException, status: int) -> NoReturn:
    """End with a mistake of the user's."""
    if os.environ.get("PHALANX_TRACEBACK") == "1":
        say(traceback.format_exc())
    fail(reason(error) if isinstance(error, SystemExit) else str(error), status)


def _crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End with an exception that nobody expected (sys.excepthook)."""
    if kind is KeyboardInterrupt:
        end(128 + signal.SIGINT, f"{place()}: interrupted", "interrupted" if leads() else None)
    watch = _watch()
    text = "".join(traceback.format_exception(kind, error, trace))
    report = f"{place()}:\n{hide(text).rstrip()}"
    # A collective that fails tells only that a peer is gone; the watch may know which one, and why.
    cause = watch.explain() if watch is not None and _from_a_collective(error) else None
    _end_with(report if cause is None else cause, status=1)


def _from_a_collective(error: BaseException) -> bool:
    """True if an error may be the echo of another rank's."""
    # gloo's errors are plain RuntimeErrors, known only by their texts
    signs = ("gloo", "NCCL", "peer", "socket")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _end_with(report: str, status: int) -> NoReturn:
    """End with an error, or with the world's first one if another rank has told its own before."""
    watch, first = _watch(), True
    if watch is not None:
        report, first = watch.tell(report)
    if first:
        say(report)
    if watch is not None:
        watch.linger()  # rank 0 keeps the store in which the others find the error
    end(status, report, None)


def _watch() -> "Watch | None":
    """This rank's watch, once there is one."""
    # An import here would load torch, only to find that there is no watch yet.
    module = sys.modules.get("phalanx.distributed.watchdog")
    return None if module is None else module.current
