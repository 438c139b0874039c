"""A rule across keys of a configuration, and helpers for the tables of rules."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
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
CONTEXT = "parallel.ulysses_sequence_parallel_size"


@dataclass(frozen=True)
class Rule:
    """A row of a table of rules.

    keys: the keys that the rule concerns, separated by spaces; the message names one of them.
    schema: name of the schema to which it applies.
    broken: function of the configuration `c` and the table's further argument. The rule is broken if its result `x` is
        true.
    message: text of the error, a format string of c, x and the further argument: `a`, the algorithm, `w`, the ranks, or
        `m`, the settings of the model. One that begins with a blank or a sign goes on behind the first key and its
        value, as in `rollout.n: 1`, or behind those of the key that x names.
    """

    keys: str
    schema: str
    broken: Callable[..., Any]
    message: str

    def text(self, c: Any, x: Any, **given: Any) -> str:
        """The message about a configuration that breaks the rule."""
        text, keys = self.message.format(c=c, x=x, **given), self.keys.split()
        if text[0] not in " ;:":
            return text
        return key_and_value(c, x if isinstance(x, str) and x in keys else keys[0]) + text


@dataclass(frozen=True)
class Ranks:
    """Ranks of a launch.

    width: ranks that share one copy of the weights. node: ranks of a node that train. sampling_node: ranks of a node
    that sample. apart: whether different ranks train and sample. restarts: whether ranks may be restarted. in_place:
    whether those of other nodes then go on.
    """

    width: int
    node: int
    sampling_node: int
    apart: bool
    restarts: bool
    in_place: bool = False


def value_of(c: Any, key: str) -> Any:
    """The value of a dotted key, or the section that it names."""
    return reduce(lambda section, name: vars(section)[name], key.split("."), c)


def key_and_value(c: Any, key: str) -> str:
    """A dotted key with its value as in a file, such as `rollout.n: 1`; in a joint run the key of its policy."""
    above, _, leaf = key.rpartition(".")
    section = value_of(c, above) if above else c
    return f"{f'{section:{leaf}}' if isinstance(section, Section) else key}: {_in_a_file(vars(section)[leaf])}"


def _in_a_file(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def without_choice(c: Any, **given: Any) -> Iterator[str]:
    """Iterate over the messages about keys that are set in `c`, although the choice that gives them a meaning is not
    made. given: `a`, the algorithm, for choices that depend on its facts, instead of the others.
    """
    schemas = {schema.__name__ for schema in type(c).__mro__}
    for key, value, choices in _conditional_keys(c, "", ()):
        for choice in choices:
            applies = choice.schema in schemas and choice.fact is bool(given)
            if applies and not choice.made(c, key.rpartition(".")[2], *given.values()):
                yield f"{key}: {_in_a_file(value)} {choice.message.format(c=c)}"


def _conditional_keys(
    section: Any, name: str, above: tuple[Choice, ...]
) -> Iterator[tuple[str, Any, tuple[Choice, ...]]]:
    """Iterate over the keys that are not at their defaults and need choices: dotted name, value, choices."""
    defaults = type(section)()
    for f in fields(section):
        value, key = vars(section)[f.name], f"{name}.{f.name}".lstrip(".")
        choices = (*above, *(f.metadata["only"] if "only" in f.metadata else ()))
        if is_dataclass(value):
            if isinstance(value, Section) and value.names[""].endswith(f".{key}"):
                key = value.names[""]  # of a policy of a joint run
            yield from _conditional_keys(value, key, choices)
        elif choices and value != vars(defaults)[f.name]:
            yield key, value, choices
