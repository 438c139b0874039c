"""Kinds of phases of a training step, and what distinguishes them for a plan."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of phase, by its name in the ledger.

    `passes`: the purpose of its forward passes, in words; `message`: the name of weights that are gathered for them.
    `draws`: samples are drawn; `decodes`: they become images or texts. `optional`: it does nothing without a pass.
    """

    name: str
    passes: str = ""
    message: str = ""
    draws: bool = False
    decodes: bool = False
    optional: bool = False


_SCORES = "weights, gathered to score samples"
_BEFORE = (
    Kind("rollout: sample", "to sample", "weights, gathered to sample", draws=True, optional=True),
    Kind("rollout: decode", decodes=True),
    Kind("rollout: log-probs", "of old log-probs", _SCORES),
    Kind("validation: sample", draws=True, optional=True),
    Kind("validation: decode", decodes=True),
    Kind("judge"),
    Kind("rescore", "to score samples again", _SCORES, optional=True),
    Kind("reference", "of the reference", "weights, gathered for the reference"),
)
_AFTER = (Kind("encode images"), Kind("update", "to train", "weights, gathered to train"))


def kinds(teachers: Iterable[str]) -> list[Kind]:
    """The kinds of phases in their order in a step, with those of the teachers of these names."""
    of_teachers = [Kind(name, f"of the {name}", f"weights of the {name}, gathered") for name in teachers]
    return [*_BEFORE, *of_teachers, *_AFTER]
