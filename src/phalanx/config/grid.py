"""The runs of a sweep: a configuration for each combination of the values that `sweep` lists."""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from phalanx.config.messages import ConfigError, cut, told_as

T = TypeVar("T")
# Keys that a sweep may list: sections, or single keys. All others belong to the base, or to the sweep as a whole.
SWEPT = (
    *("optim", "algorithm", "actor", "rollout", "reward", "flow_matching", "block_diffusion", "data.seed"),
    *("data.train_batch_size", "data.train_batch_size_per_gpu", "trainer.seed", "trainer.total_training_steps"),
)
# keys in these sections on which the policy depends that the runs share, or how the keys are read
FIXED = (
    *("algorithm.name", "rollout.engine", "rollout.schedule", "rollout.temperature", "rollout.top_k", "rollout.top_p"),
    *("rollout.min_p", "actor.detach_uncond", "actor.log_prob_chunk_size", "actor.log_prob_estimate"),
    *("actor.use_dynamic_bsz", "reward.model"),
)
MOST = 64  # runs of a sweep


def runs_of(config: Any, load: Callable[[list[str]], T]) -> dict[str, T]:
    """The configuration of each run by its name, which is also that of its folder. load: loads the configuration with
    further `key=value` overrides. Raises ConfigError for keys and values that a sweep cannot have.
    """
    lists = config.sweep
    for key, values in lists.items():
        _check(key, values)
    trainer, runs = config.trainer, dict[str, T]()
    count = math.prod(map(len, lists.values()))
    if count > MOST:
        raise ConfigError(f"sweep: {count} combinations; expected at most {MOST}")
    for point in itertools.product(*lists.values()):
        words = [f"{key}={json.dumps(value)}" for key, value in zip(lists, point, strict=True)]
        with told_as(ConfigError, f"sweep: {' '.join(words)}: ", ConfigError):
            name = ",".join(_parts(load(words), lists))
        if name in runs:
            raise ConfigError(f"sweep: two runs are named {cut(name)}; expected different values")
        words.append(f"trainer.output_dir={json.dumps(f'{trainer.output_dir}/{name}')}")
        words.append(f"trainer.experiment_name={json.dumps(f'{trainer.experiment_name}/{name}')}")
        runs[name] = load(words)
    return runs


def dotted(sweep: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted keys of `sweep` and their values: a file may write `optim.lr: [...]` or `optim: {lr: [...]}`."""
    for name, value in sweep.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _check(key: str, values: Any) -> None:
    if not _is_within(key, SWEPT):
        raise ConfigError(
            f"sweep.{key}: all runs of a sweep share the model, the ranks and the data; expected keys of "
            f"{', '.join(SWEPT[:-1])} or {SWEPT[-1]}"
        )
    if _is_within(key, FIXED):
        raise ConfigError(f"sweep.{key}: what all runs of a sweep share depends on it; expected a sweep for each value")
    if not isinstance(values, list) or not values:
        raise ConfigError(f"sweep.{key}: expected a list of values, got {cut(json.dumps(values))}")


def _parts(config: Any, keys: Mapping[str, Any]) -> Iterator[str]:
    """The parts of a run's name: its values, as they are in its configuration."""
    for key in keys:
        value: Any = config
        for name in key.split("."):
            value = vars(value)[name]
        yield f"{key}={value}".replace("/", "_").replace(" ", "")


def _is_within(key: str, sections: Sequence[str]) -> bool:
    """Whether a key is one of these, or in one of these sections."""
    return any(f"{key}.".startswith(f"{section}.") for section in sections)
