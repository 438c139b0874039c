r"""Reward: mathematics about an image, as verl scores Geometry3K: the answer in \boxed{...}, and the format.

    score = (1 - w) * right + w * formed

`formed` is 1 for a text <think>...</think>...\boxed{...}... that begins with the tag, else 0. `right` is the score of
the reward `math`, which accepts more forms of an answer than verl's.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.rewards.text.math import Math

_FORM = ("</think>", "\\boxed{", "}")


class Geo3k(RewardWithExtras):
    """The score in 0..1. format_weight: w; for the other arguments see the reward math."""

    def __init__(
        self,
        format_weight: float = 0.1,
        equivalence: Literal["math_verify", "string"] = "math_verify",
        timeout_s: float = 5.0,
    ) -> None:
        if not 0 <= format_weight <= 1:
            raise ValueError(f"format_weight={format_weight} should be in 0..1")
        self._weight, self._math = format_weight, Math(equivalence, timeout_s=timeout_s)
        self.extras = self._math.extras

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> RewardOutput:
        output = self._math(completions, prompts, metadata)
        scores = []
        for completion, right in zip(completions, output.scores, strict=True):
            scores.append((1 - self._weight) * float(right) + self._weight * formed(completion))
        return RewardOutput(scores, output.extras)

    def answer(self, completion: str) -> str | None:
        """The answer of a solution, see GivesAnswers."""
        return self._math.answer(completion)

    def check_row(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a ground truth."""
        self._math.check_row(prompt, metadata)


def formed(text: str) -> bool:
    """Whether a text begins with thoughts in tags, followed by an answer in a box."""
    end = 0 if text.startswith("<think>") else -1
    for mark in _FORM:
        end = text.find(mark, end) if end >= 0 else -1
    return end >= 0
