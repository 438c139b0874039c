"""A rule across keys of a configuration, and what the tables of rules share."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any

# names of the schemas that rules are for; a rule is for those derived from its schema as well
RUN, RL = "RunConfig", "RLConfig"
FLOW, FLOW_RL, FLOW_MATCHING = "FlowRunConfig", "FlowRLConfig", "FlowMatchingTaskConfig"
LM, LM_RL, BLOCK_DIFFUSION = "LMRunConfig", "LMRLConfig", "BlockDiffusionTaskConfig"
JOINT = "JointConfig"
SAMPLE, GENERATE, PREPARE_DATA = "SampleConfig", "GenerateConfig", "PrepareDataConfig"
EVALUATE = "EvaluateConfig"
COLDEST = 0.01  # of temperatures that draw


@dataclass(frozen=True)
class Rule:
    """A row of a table of rules.

    keys: the keys that it is about, with spaces between them; the message names one of them.
    schema: the name of the schema that it is for.
    sentence: the rule in words, for the documentation.
    broken: a function of the configuration `c`, and of what else the table's rules are given. The rule is broken where
        its value `x` is true.
    message: the text of the error, a format of c, x and what else `broken` is given (`a`, the algorithm, `w`, the
        ranks, or `m`, the settings of the model).
    """

    keys: str
    schema: str
    sentence: str
    broken: Callable[..., Any]
    message: str


@dataclass(frozen=True)
class Ranks:
    """Ranks of a launch: `node` of each node train, `width` share one copy of the weights, `sampling_node` of each node
    sample. `apart`: those are others. `restarts`: ranks may be restarted.
    """

    width: int
    node: int
    sampling_node: int
    apart: bool
    restarts: bool


def changed(section: Any, default: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """The keys of a section whose values differ from those of another, with these values."""
    for f in fields(section):
        value, other = vars(section)[f.name], vars(default)[f.name]
        if is_dataclass(value):
            yield from changed(value, other, f"{prefix}{f.name}.")
        elif value != other:
            yield f"{prefix}{f.name}", value


def of_part(message: str, part: str) -> str:
    """The text of an error about the configuration of a joint run's policy, with the joint run's keys."""
    message = re.sub(r"(?<![\w.])(model|rollout|algorithm|actor|optim)\.(?=[a-z])", rf"{part}.\1.", message)
    if part == "painter":  # its data is what the writer makes of the run's
        message = message.replace("data.max_prompt_length", "data.max_rewrite_length")
        texts = "data.train_batch_size x (writer.rollout.n + rewrite.keep_originals) "
        message = re.sub(r"(?<![\w.])data\.train_batch_size (?=\d)", texts, message)
    return message


def beside_per_gpu(section: Any, key: str) -> tuple[Any, Any, Any] | None:
    """The values of `<key>_per_gpu` and `key` where both are set, and the default of `key`; None where one is."""
    value, per_gpu = vars(section)[key], vars(section)[f"{key}_per_gpu"]
    default = next(f.default for f in fields(section) if f.name == key)
    return (per_gpu, value, default) if per_gpu is not None and value != default else None


def too_cold(schema: str, key: str) -> Rule:
    """The rule on a temperature that may be 0, the key of a configuration with dots."""
    return Rule(key, schema, "A temperature is 0, which takes the likeliest token, or at least 0.01.",
                lambda c: 0 < (attrgetter(key)(c) or 0) < COLDEST,
                f"{key}: {{c.{key}:g}} leaves float32 no choice but the likeliest token; set it to 0, or to at least "
                f"{COLDEST}")  # fmt: skip


def not_betas(betas: list[float]) -> bool:
    """Whether these are not two numbers in 0 .. 1."""
    return len(betas) != 2 or not all(0 <= beta < 1 for beta in betas)


def near_multiples(number: int, unit: int) -> tuple[int, int]:
    """The multiples of `unit` below and above a number, the first one at least `unit`."""
    below = max(number // unit, 1) * unit
    return below, below + unit
