"""A rule across keys of a configuration, and helpers for the tables of rules."""

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any

# names of schemas; a rule also applies to schemas derived from its own
RUN, RL = "RunConfig", "RLConfig"
FLOW, FLOW_RL, FLOW_MATCHING = "FlowRunConfig", "FlowRLConfig", "FlowMatchingTaskConfig"
LM, LM_RL, BLOCK_DIFFUSION = "LMRunConfig", "LMRLConfig", "BlockDiffusionTaskConfig"
JOINT = "JointConfig"
SAMPLE, GENERATE, PREPARE_DATA = "SampleConfig", "GenerateConfig", "PrepareDataConfig"
EVALUATE = "EvaluateConfig"
COLDEST = 0.01  # lowest temperature above 0, which is greedy


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


def changed(section: Any, default: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Iterate over the keys of a section whose values differ from those of `default`, with these values."""
    for f in fields(section):
        value, other = vars(section)[f.name], vars(default)[f.name]
        if is_dataclass(value):
            yield from changed(value, other, f"{prefix}{f.name}.")
        elif value != other:
            yield f"{prefix}{f.name}", value


def first_set(section: Any, keys: Container[str] | None = None) -> tuple[str, Any] | None:
    """The first key of a section, one of `keys` if given, that differs from its default, and its value."""
    for key, value in changed(section, type(section)(), ""):
        if keys is None or key.rpartition(".")[2] in keys:
            return key, value
    return None


def beside_per_gpu(section: Any, key: str) -> tuple[Any, Any, Any] | None:
    """If both `<key>_per_gpu` and `key` are set: their values and the default of `key`. Otherwise None."""
    value, per_gpu = vars(section)[key], vars(section)[f"{key}_per_gpu"]
    default = next(f.default for f in fields(section) if f.name == key)
    return (per_gpu, value, default) if per_gpu is not None and value != default else None


def too_cold(schema: str, key: str, named: str | None = None) -> Rule:
    """The rule for a temperature that may be 0. key: its dotted key. named: its name in the message, if not the key."""
    return Rule(key, schema, "A temperature is 0, which selects the most likely token, or at least 0.01.",
                lambda c: 0 < (attrgetter(key)(c) or 0) < COLDEST,
                f"{named or key}: {{c.{key}:g}} is so low that float32 always selects the most likely token; set it to "
                f"0, or to at least {COLDEST}")  # fmt: skip


def not_betas(betas: list[float]) -> bool:
    """Whether these are not two numbers of at least 0 and less than 1."""
    return len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)


def near_multiples(number: int, unit: int) -> tuple[int, int]:
    """The multiples of `unit` next below and above a number; the lower one is at least `unit`."""
    below = max(number // unit, 1) * unit
    return below, below + unit
