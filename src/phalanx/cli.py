"""What every task's command line shares: --help, the configuration, and errors told once."""

import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

from phalanx.config import ConfigError, help_text, load

T = TypeVar("T")

# said by libraries at import or at every load; nothing in it is for the user of a task
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
warnings.filterwarnings("ignore", message=".*torch_dtype.*", category=FutureWarning)


def parse(schema: type[T], description: str, argv: list[str] | None = None) -> T:
    """The configuration from `[config.yaml] [key=value ...]`; prints --help and exits where asked.

    A mistake ends the process with status 2 and one line, printed by rank 0 alone.
    """
    # rank 0 speaks for all; what only another rank sees is an error, and errors are told by `fail`
    logging.basicConfig(level=logging.WARNING if rank() == 0 else logging.ERROR, format="%(levelname)s: %(message)s")
    argv = sys.argv[1:] if argv is None else argv
    words = [a for a in argv if a not in ("-h", "--help")]
    options = [word for word in words if word.startswith("-")]
    path = words.pop(0) if words and "=" not in words[0] else None
    try:
        if options:
            raise ConfigError(f"unknown option {options[0]}; right is [config.yaml] [key=value ...], or --help")
        if len(words) < len(argv) - (path is not None):
            if rank() == 0:
                print(help_text(schema, description, path, words))
            sys.exit(0)
        return load(schema, path, words)
    except ConfigError as error:
        fail(str(error), status=2)


def run(build: Callable[[T], Callable[[], None]], config: T) -> NoReturn:
    """Build a job, run it and exit; mistakes of the user's end it with one line.

    A ValueError of `build` (data, model folder, rewards, batch arithmetic) is such a mistake, and so is a JobError of
    the job itself. Anything else keeps its traceback; PHALANX_TRACEBACK=1 shows it for all.
    """
    from phalanx.types import JobError

    try:
        job = build(config)
    except ValueError as error:
        _tell(error, status=2)
    try:
        job()
    except JobError as error:
        _tell(error, status=1)
    # All is written and closed. Worker threads and those of process groups would outlive the interpreter's teardown; a
    # rank was seen to abort ("terminate called without an active exception"), which this most likely prevents.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _tell(error: Exception, status: int) -> NoReturn:
    if os.environ.get("PHALANX_TRACEBACK") == "1":
        traceback.print_exc()
    fail(str(error), status)


def rank() -> int:
    """This process's rank in the world, by torchrun's environment."""
    return int(os.environ.get("RANK", "0"))


def fail(message: str, status: int) -> NoReturn:
    """Print one line and exit at once, without waiting for worker threads.

    Rank 0 speaks first. The others wait: where rank 0 fails as well, torchrun ends them before they repeat it.
    """
    if rank() != 0:
        time.sleep(5)
    prefix = "error" if rank() == 0 else f"error on rank {rank()}"
    print(f"{prefix}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)
