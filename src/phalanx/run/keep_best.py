"""The metric by which checkpoints are compared: trainer.keep_best."""

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from phalanx.config.messages import ConfigError
from phalanx.config.run import TrainerConfig
from phalanx.distributed.collectives import broadcast_object
from phalanx.run.checkpoint import Checkpointer
from phalanx.run.checkpoint_folder import best_checkpoint
from phalanx.types import JobError

KEY = "trainer.keep_best"


def judgement(trainer: TrainerConfig, row: Mapping[str, float]) -> dict[str, Any] | None:
    """The value of the metric in the row of a checkpoint's step, as its meta.json has it; None without a metric."""
    if trainer.keep_best is None:
        return None
    value = float(row.get(trainer.keep_best, math.nan))
    value_or_null = value if math.isfinite(value) else None
    return {"metric": trainer.keep_best, "mode": trainer.keep_best_mode, "value": value_or_null}


def check_sets(trainer: TrainerConfig, sets: Iterable[str]) -> None:
    """Raise ConfigError if the metric is one of a validation set that does not exist. Joint runs add the kind of prompt
    to the names of sets.
    """
    names = tuple(sets)
    metric = trainer.keep_best or ""
    if metric.startswith("val/") and not metric.startswith(tuple(f"val/{name}{end}" for name in names for end in "/_")):
        raise ConfigError(f"{KEY}: {metric} is of none of the validation sets, {', '.join(names) or 'none'}")


def check_metric(trainer: TrainerConfig, row: Mapping[str, float], step: int, checkpointer: Checkpointer) -> None:
    """Raise JobError on all ranks if the metric is not in the row of a step, and no checkpoint has it either."""
    name, problem = trainer.keep_best, None
    if name is None:
        return
    # rank 0 has all metrics
    if checkpointer.world.rank == 0 and name not in row and best_checkpoint(checkpointer.root) is None:
        near = get_close_matches(name, row, 3, 0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(row)}"
        problem = f"{KEY}: step {step} has no metric {name}; {hint}"
    problem = broadcast_object(problem)
    if problem is not None:
        raise JobError(problem)
