"""The loggers of `trainer.logger`, one per file, and the base class for new ones."""

import importlib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.config.messages import ConfigError, nearest
from phalanx.config.registry import built_in, known_modules, object_forms, resolve_object
from phalanx.config.run import TrainerConfig
from phalanx.telemetry.records import Record

if TYPE_CHECKING:
    from phalanx.telemetry.timers import Timers

PACKAGE = "phalanx.zoo.loggers"
KEY = "trainer.logger"
ELAPSED = "perf/elapsed_s"
# losses of supervised training, of regression and preference algorithms, and of distillation
LOSS = re.compile(r"train/loss|actor/(?:flow_loss|dpo_loss|nll|loss_positive|loss_negative|teacher_\w+)")


@dataclass(frozen=True)
class RunStart:
    """The arguments of a logger when a run starts or resumes.

    `trainer` is the configuration section with `output_dir`, `project_name` and `experiment_name`. `config` is the
    resolved configuration, which contains references to environment variables instead of their values. `step` of
    `total_steps` training steps are completed: 0 in a new run, k after resuming from a checkpoint of step k. `id` is
    the logger's run id from that checkpoint, None in a new run. `timers` show the job's current phase.
    """

    trainer: TrainerConfig
    config: dict[str, Any]
    step: int
    total_steps: int
    id: str | None
    timers: "Timers"


def setting(config: dict[str, Any], name: str) -> Any:
    """The value of a dotted key such as `model.path` in a configuration of nested dicts; None if it is not set."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


class Logger:
    """Base class of loggers, which log one run on rank 0. Subclasses override the methods they need.

    An exception in `__init__` ends the job before its first step, with one line. An exception in another method only
    switches this logger off, with a warning. Training waits for all methods.
    """

    extra: ClassVar[str | None] = None  # the package that this logger needs, and the extra of phalanx that installs it
    terminal: ClassVar[bool] = False  # whether it uses the terminal: opened after all other loggers, and called first
    # A resumed run repeats the steps after its checkpoint. True: if it continues under its `id`, the logger keeps what
    # was logged for these steps before, and does not receive them again.
    append_only: ClassVar[bool] = False
    one_run: ClassVar[bool] = False  # whether a process cannot log several runs at once, as in a sweep
    id: str | None = None  # saved in checkpoints, so that a resumed run can continue under it

    def __init__(self, start: RunStart) -> None:
        """Open a new run, or continue the run `start.id`."""

    def log(self, step: int, row: dict[str, float]) -> None:
        """Log a row of metrics.jsonl after `step` training steps. Values may be NaN or infinite."""

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        """Log the samples of a validation on `set_name`: at least one, sorted by index. `folder` contains their files:
        see phalanx.telemetry.records.save_records.
        """

    def close(self, failed: bool) -> None:
        """Close the run, which a resumed job may continue; `failed`: the job raised an error."""


def cannot_start(name: str, error: Exception) -> ConfigError:
    """The error for a tracker that could not open a run."""
    reason = " ".join(str(error).split()).rstrip(".")
    return ConfigError(
        f"{KEY}: {name} could not start: {reason}; run `{name} login`, set {name.upper()}_MODE=offline, or leave "
        f"{name} out"
    )


def check_loggers(entries: Iterable[str]) -> dict[str, type[Logger]]:
    """The class of each entry of `trainer.logger`: a module of this package, or module:Class or path/to/file.py:Class.

    Raises ConfigError if the class does not exist, or the package that it needs is not installed.
    """
    return {entry: _logger_class(entry) for entry in entries}


def _logger_class(entry: str) -> type[Logger]:
    if ":" in entry:
        kind = resolve_object(entry, KEY, "class")
    else:
        known = known_modules(PACKAGE)
        if entry not in known:
            raise ConfigError(
                f"{KEY}: {entry!r} is not a built-in logger{nearest(entry, known) or ';'} built in: "
                f"{', '.join(known)}; or give {object_forms('class')}"
            )
        kind = built_in(PACKAGE, entry)
    if not isinstance(kind, type) or not issubclass(kind, Logger):
        raise ConfigError(f"{KEY}={entry!r} is not a class derived from Logger of {__name__}")
    if kind.extra is not None and importlib.util.find_spec(kind.extra) is None:
        raise ConfigError(f"{KEY}: the package {kind.extra} is not installed; pip install 'phalanx[{kind.extra}]'")
    return kind
