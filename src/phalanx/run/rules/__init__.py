"""The rules across keys of a configuration, in tables. docs/rules.md is generated from them.

RULES depend only on the configuration and are checked when it is loaded. START_RULES also depend on facts of the
algorithm, or require keys that a file may leave out but a job needs; they are checked before a job starts. LAUNCH_RULES
also depend on the ranks, and MODEL_RULES on the section `model` of the run whose checkpoint is sampled.
Constraints on a single key are in its schema; rules that depend on files or tensors are checked where these are read.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from phalanx.config.grid import runs_of
from phalanx.config.load import load
from phalanx.config.messages import ConfigError
from phalanx.run.rules import (
    algorithm_rules,
    batch_rules,
    block_rules,
    environment_rules,
    joint_rules,
    layout_rules,
    rollout_rules,
    sweep_rules,
    task_rules,
)
from phalanx.run.rules.rule import Ranks as Ranks
from phalanx.run.rules.rule import Rule as Rule
from phalanx.run.rules.rule import without_choice

T = TypeVar("T")
# in the order of the checks
RULES = (
    *joint_rules.RULES,
    *batch_rules.RULES,
    *algorithm_rules.RULES,
    *block_rules.RULES,
    *environment_rules.RULES,
    *rollout_rules.RULES,
    *layout_rules.RULES,
    *sweep_rules.RULES,
    *task_rules.RULES,
)
START_RULES = (*batch_rules.START_RULES, *algorithm_rules.START_RULES, *rollout_rules.START_RULES)
LAUNCH_RULES = layout_rules.LAUNCH_RULES
MODEL_RULES = block_rules.MODEL_RULES


def broken(rules: Iterable[Rule], c: Any, **given: Any) -> Iterator[tuple[Rule, str]]:
    """Iterate over the rules that a configuration breaks, in order, with their messages. given: see Rule.broken."""
    schemas = {schema.__name__ for schema in type(c).__mro__}
    if "CheckClusterConfig" in schemas:  # it has the keys of several jobs, which are checked separately
        return
    for rule in rules:
        if rule.schema in schemas:
            x = rule.broken(c, *given.values())
            if x:
                yield rule, rule.text(c, x, **given)
    if "JointConfig" in schemas:
        for config in c.parts().values():
            yield from broken(rules, config, **given)


def load_config(schema: type[T], path: str | None, overrides: list[str]) -> T:
    """Load a configuration, see phalanx.config.load.load, and check RULES. Raises ConfigError.

    That of a sweep has those of its runs as `runs`.
    """

    def loaded(words: Sequence[str] = (), **fixed: Any) -> T:
        config = load(schema, path, [*overrides, *words])
        vars(config).update(fixed)
        check(config)
        return config

    config = loaded()
    if vars(config).get("sweep"):
        vars(config)["runs"] = runs_of(config, partial(loaded, sweep={}))
    return config


def check(c: Any) -> None:
    """Raise ConfigError for the first key without its choice, or else for the first of RULES that is broken."""
    _check_choices(c)
    _check(RULES, c)


def check_start(c: Any, algorithm: Any = None) -> None:
    """Raise ConfigError for the first of RULES and START_RULES that a job breaks. algorithm: an instance with the facts
    of phalanx.types.Algorithm.
    """
    check(c)  # again, because a configuration may have been changed or made without a file
    if algorithm is not None:
        _check_choices(c, a=algorithm)
    _check(START_RULES, c, a=algorithm)


def check_launch(c: Any, ranks: Ranks) -> None:
    """Raise ConfigError for the first of LAUNCH_RULES that a job breaks on these ranks."""
    _check(LAUNCH_RULES, c, w=ranks)


def check_model(c: Any, model: Any) -> None:
    """Raise ConfigError for the first of MODEL_RULES that a task breaks. model: the settings of the sampled model."""
    _check(MODEL_RULES, c, m=model)


def _check_choices(c: Any, **given: Any) -> None:
    """Raise ConfigError for the first key that is set without the choice that gives it a meaning."""
    for config in (c, *(c.parts().values() if "JointConfig" in {s.__name__ for s in type(c).__mro__} else ())):
        for message in without_choice(config, **given):
            raise ConfigError(message)


def _check(rules: Iterable[Rule], c: Any, **given: Any) -> None:
    for _, message in broken(rules, c, **given):
        raise ConfigError(message)
