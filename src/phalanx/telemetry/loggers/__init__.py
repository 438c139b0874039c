"""The loggers of `trainer.logger`, a file each, and the class that new ones derive from."""

import importlib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from phalanx.config.load import ConfigError
from phalanx.config.messages import nearest
from phalanx.config.registry import known_modules, object_forms, resolve_object
from phalanx.config.run import TrainerConfig
from phalanx.telemetry.records import Record

if TYPE_CHECKING:
    from phalanx.telemetry.metrics import Timers

PACKAGE = "phalanx.telemetry.loggers"
KEY = "trainer.logger"
ELAPSED = "perf/elapsed_s"
# metrics that are losses: of supervised training, of regressions and preferences, and of distillation
LOSS = re.compile(r"train/loss|actor/(?:flow_loss|dpo_loss|nll|loss_positive|loss_negative|teacher_\w+)")


@dataclass(frozen=True)
class RunStart:
    """The arguments of a logger, when a run starts or is resumed.

    `trainer` is the section of that name: `output_dir`, `project_name`, `experiment_name`. `config` is the resolved
    configuration; what came from the environment is a reference in it, not the value. `step` training steps of
    `total_steps` are done: 0 in a new run, k in one that is resumed from a checkpoint of step k. `id` is the logger's
    own, as that checkpoint keeps it; None in a new run. `timers` know what the job is at.
    """

    trainer: TrainerConfig
    config: dict[str, Any]
    step: int
    total_steps: int
    id: str | None
    timers: "Timers"


def setting(config: dict[str, Any], name: str) -> Any:
    """The value of a dotted key such as `model.path` of a configuration as nested dicts; None where there is none."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


class Logger:
    """A logger of one run, on rank 0. A new one derives from this class and overrides what it has to do.

    What `__init__` raises ends the job before its first step, with one line. What the other methods raise turns this
    logger off, with a warning: the run is worth more than its log. They hold up the training until they return.
    """

    extra: ClassVar[str | None] = None  # of phalanx, called as the package that this logger needs
    terminal: ClassVar[bool] = False  # it takes the terminal: it is opened after the others, and closed before them
    # A resumed run repeats the steps after its checkpoint. True: a run that is continued by its `id` keeps the rows and
    # samples that it has of them, and does not get those steps again.
    append_only: ClassVar[bool] = False
    id: str | None = None  # under which a resumed run goes on; checkpoints keep it

    def __init__(self, start: RunStart) -> None:
        """Open the run, or go on with the one of `start.id`."""

    def log(self, step: int, row: dict[str, float]) -> None:
        """Log a row of metrics.jsonl, after `step` training steps. Values may be NaN or infinite."""

    def records(self, step: int, set_name: str, records: list[Record], folder: Path) -> None:
        """Log the samples of a validation on the set `set_name`, at least one, sorted by index. `folder` has them as
        files: see phalanx.telemetry.records.save_records.
        """

    def close(self, failed: bool) -> None:
        """End the run for now; `failed` says that the job raised an error. A resumed job goes on with it."""


def check_loggers(entries: Iterable[str]) -> dict[str, type[Logger]]:
    """The class of each entry of `trainer.logger`: a module of this package, or module:Class or path/to/file.py:Class.

    Raises ConfigError where there is none, or where the package that it needs is not installed.
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
        kind = vars(importlib.import_module(f"{PACKAGE}.{entry}"))[entry.capitalize()]
    if not isinstance(kind, type) or not issubclass(kind, Logger):
        raise ConfigError(f"{KEY}={entry!r} is not a class derived from Logger of {PACKAGE}")
    if kind.extra is not None and importlib.util.find_spec(kind.extra) is None:
        raise ConfigError(f"{KEY}: the package {kind.extra} is not installed; pip install 'phalanx[{kind.extra}]'")
    return kind
