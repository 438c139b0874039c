"""A rule across keys of a configuration, and helpers for the tables of rules."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from phalanx.config.choices import Choice
from phalanx.config.section import Section

# names of schemas; a rule also applies to schemas derived from its own
RUN, RL = "RunConfig", "RLConfig"
FLOW, FLOW_RL, FLOW_MATCHING = "FlowRunConfig", "FlowRLConfig", "FlowMatchingTaskConfig"
LM, LM_RL, BLOCK_DIFFUSION = "LMRunConfig", "LMRLConfig", "BlockDiffusionTaskConfig"
JOINT = "JointConfig"
SAMPLE, GENERATE, PREPARE_DATA = "SampleConfig", "GenerateConfig", "PrepareDataConfig"
EVALUATE = "EvaluateConfig"


@dataclass(frozen=True)
class Rule:
    """A row of a table of rules.

    keys: the keys that the rule concerns, separated by spaces; the message names one of them.
    schema: name of the schema to which it applies.
    sentence: the rule in words, for the documentation.
    broken: function of the configuration `c` and the table's further argument. The rule is broken if its result `x` is
        true.
    message: text of the error, a format string of c, x and the further argument: `a`, the algorithm, `w`, the ranks, or
        `m`, the settings of the model.
    """

    keys: str
    schema: str
    sentence: str
    broken: Callable[..., Any]
    message: str


@dataclass(frozen=True)
class Ranks:
    """Ranks of a launch.

    width: ranks that share one copy of the weights. node: ranks of a node that train. sampling_node: ranks of a node
    that sample. apart: whether different ranks train and sample. restarts: whether ranks may be restarted.
    """

    width: int
    node: int
    sampling_node: int
    apart: bool
    restarts: bool


def beside_per_gpu(section: Any, key: str) -> tuple[Any, Any, Any] | None:
    """If both `<key>_per_gpu` and `key` are set: their values and the default of `key`. Otherwise None."""
    value, per_gpu = vars(section)[key], vars(section)[f"{key}_per_gpu"]
    default = next(f.default for f in fields(section) if f.name == key)
    return (per_gpu, value, default) if per_gpu is not None and value != default else None


def near_multiples(number: int, unit: int) -> tuple[int, int]:
    """The multiples of `unit` next below and above a number; the lower one is at least `unit`."""
    below = max(number // unit, 1) * unit
    return below, below + unit


def without_choice(c: Any, **given: Any) -> Iterator[str]:
    """Iterate over the messages about keys that are set in `c`, although the choice that gives them a meaning is not
    made. given: `a`, the algorithm, for choices that depend on its facts, instead of the others.
    """
    schemas = {schema.__name__ for schema in type(c).__mro__}
    for key, value, choices in _keys(c, "", ()):
        for choice in choices:
            applies = choice.schema in schemas and choice.fact is bool(given)
            if applies and not choice.made(c, key.rpartition(".")[2], *given.values()):
                shown = str(value).lower() if isinstance(value, bool) else value
                yield f"{key}: {shown} {choice.message.format(c=c)}"


def _keys(section: Any, name: str, above: tuple[Choice, ...]) -> Iterator[tuple[str, Any, tuple[Choice, ...]]]:
    """Iterate over the keys that are not at their defaults and need choices: dotted name, value, choices."""
    defaults = type(section)()
    for f in fields(section):
        value, key = vars(section)[f.name], f"{name}.{f.name}".lstrip(".")
        choices = (*above, *(f.metadata["only"] if "only" in f.metadata else ()))
        if is_dataclass(value):
            if isinstance(value, Section) and value.names[""].endswith(f".{key}"):
                key = value.names[""]  # of a policy of a joint run
            yield from _keys(value, key, choices)
        elif choices and value != vars(defaults)[f.name]:
            yield key, value, choices
