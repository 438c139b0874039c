r"""Reward: mathematics about an image, as verl scores Geometry3K: the answer in \boxed{...}, and the format.

    score = (1 - w) * right + w * formed

`formed` is 1 for a text <think>...</think>...\boxed{...}... that begins with the tag, else 0. `right` is the score of
the reward `math`, which accepts more forms of an answer than verl's.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.rewards.base import RewardOutput
from phalanx.zoo.rewards.text.math import Math

_FORM = ("</think>", "\\boxed{", "}")


class Geo3k(Math):
    """The score in 0..1. format_weight: w; for the other arguments see the reward math."""

    def __init__(
        self,
        format_weight: Annotated[float, Field(ge=0, le=1)] = 0.1,
        equivalence: Literal["math_verify", "string"] = "math_verify",
        timeout_s: float = 5.0,
    ) -> None:
        super().__init__(equivalence, timeout_s=timeout_s)
        self._weight = format_weight

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        output = super().__call__(completions, prompts, metadata)
        scores = []
        for completion, right in zip(completions, output.scores, strict=True):
            scores.append((1 - self._weight) * float(right) + self._weight * formed(completion))
        return RewardOutput(scores, output.extras)


def formed(text: str) -> bool:
    """Whether a text begins with thoughts in tags, followed by an answer in a box."""
    end = 0 if text.startswith("<think>") else -1
    for mark in _FORM:
        end = text.find(mark, end) if end >= 0 else -1
    return end >= 0
