"""What every task's command line shares: --help, the configuration, and errors told once."""

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
from typing import TYPE_CHECKING, NoReturn, TypeVar

from phalanx.config import ConfigError, help_text, load
from phalanx.ending import Stopped, end, place, rank, say

if TYPE_CHECKING:
    from phalanx.distributed.watch import Watch

T = TypeVar("T")

# said by libraries at import or at every load; nothing in it is for the user of a task
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)

HELP = "--help: this text"
PLAN = "--plan [nnodes=4] [nproc=8] [gpu_memory_gb=80]: what the job would be on that cluster; nothing is trained"
PLAN_WORDS = ("nnodes", "nproc_per_node", "nproc", "gpu_memory_gb")  # known beside --plan alone


def parse(
    schema: type[T],
    description: str,
    argv: list[str] | None = None,
    plan: Callable[[T, dict[str, str]], str] | None = None,
) -> T:
    """The configuration from `[config.yaml] [key=value ...]`; prints --help and exits where asked, and so --plan: what
    `plan` makes of the configuration and the PLAN_WORDS that are given.

    A mistake ends the process with status 2 and one line, printed by rank 0 alone.
    """
    # rank 0 speaks for all; what only another rank sees is an error, and errors are told by `fail`
    logging.basicConfig(level=logging.WARNING if rank() == 0 else logging.ERROR, format="%(levelname)s: %(message)s")
    argv = sys.argv[1:] if argv is None else argv
    asked: dict[str, str] | None = None
    if plan is not None:
        argv, asked = _plan_words(argv)
    words = [a for a in argv if a not in ("-h", "--help")]
    options = [word for word in words if word.startswith("-")]
    path = words.pop(0) if words and "=" not in words[0] else None
    try:
        if options:
            raise ConfigError(f"unknown option {options[0]}; right is [config.yaml] [key=value ...], or --help")
        if len(words) < len(argv) - (path is not None):
            if rank() == 0:
                print(help_text(schema, description, path, words, (HELP, PLAN) if plan is not None else (HELP,)))
            sys.exit(0)
        config = load(schema, path, words)
    except ConfigError as error:
        fail(str(error), status=2)
    if plan is None or asked is None:
        return config
    try:
        text = plan(config, asked)
    except ValueError as error:
        _tell(error, status=2)
    if rank() == 0:
        print(text)
    sys.exit(0)


def _plan_words(argv: list[str]) -> tuple[list[str], dict[str, str] | None]:
    """The command line without --plan (or plan=true) and its words, and these; None where no plan is asked for."""
    pairs = [(word, word.partition("=")) for word in argv if word not in ("--plan", "plan=true")]
    found = {key: value for _, (key, equals, value) in pairs if equals and key in PLAN_WORDS}
    if len(pairs) < len(argv):
        return [word for word, (key, _, _) in pairs if key not in found], found
    if found:
        word = next(iter(found))
        fail(f"{word}={found[word]} goes with --plan; a job's own size is its launcher's, such as NNODES=2", status=2)
    return argv, None


def run(build: Callable[[T], Callable[[], None]], config: T) -> NoReturn:
    """Build a job, run it and exit; mistakes of the user's end it with one line.

    A ValueError of `build` (data, model folder, rewards, batch arithmetic) is such a mistake, and so is a JobError of
    the job itself. Anything else keeps its traceback; PHALANX_TRACEBACK=1 shows it for all. Exit status: 2 and 1 for
    these, 128 + the signal's number where the job was told to stop.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.excepthook = _crash
    from phalanx.types import JobError

    try:
        job = build(config)
    except ValueError as error:
        _tell(error, status=2)
    try:
        job()
    except JobError as error:
        _tell(error, status=1)
    except Stopped as stop:
        end(128 + stop.number, str(stop), str(stop) if rank() == 0 else None)
    # All is written and closed. Worker threads and those of process groups would outlive the interpreter's teardown; a
    # rank was seen to abort ("terminate called without an active exception"), which this most likely prevents.
    end(0)


def fail(message: str, status: int) -> NoReturn:
    """Print one line and exit at once, without waiting for worker threads.

    Rank 0 speaks first. The others wait: where rank 0 fails as well, its launcher ends them before they repeat it.
    """
    if rank() != 0:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(5)
    prefix = "error" if rank() == 0 else f"error on rank {rank()}"
    _end_with(f"{prefix}: {' '.join(message.split())}", status)


def _tell(error: Exception, status: int) -> NoReturn:
    if os.environ.get("PHALANX_TRACEBACK") == "1":
        traceback.print_exc()
    fail(str(error), status)


def _crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The end by an exception that nobody expected. A failed collective is told by its cause, where that is known."""
    if kind is KeyboardInterrupt:
        end(128 + signal.SIGINT, f"{place()}: interrupted", "interrupted" if rank() == 0 else None)
    watch = _watch()
    report = f"{place()}:\n{''.join(traceback.format_exception(kind, error, trace)).rstrip()}"
    cause = watch.explain() if watch is not None and _from_a_collective(error) else None
    _end_with(report if cause is None else cause, status=1)


def _from_a_collective(error: BaseException) -> bool:
    """Whether an error may be the echo of another rank's. Gloo's are plain RuntimeErrors."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "peer", "socket"))


def _end_with(report: str, status: int) -> NoReturn:
    """End with an error, or with the world's first one where another rank was earlier and has said it already."""
    watch, first = _watch(), True
    if watch is not None:
        report, first = watch.tell(report)
    if first:
        say(report)
    if watch is not None:
        watch.linger()
    end(status, report, None)


def _watch() -> "Watch | None":
    """The watch of the world, once there is one: until then nothing heavy is imported."""
    module = sys.modules.get("phalanx.distributed.watch")
    return None if module is None else vars(module)["current"]
