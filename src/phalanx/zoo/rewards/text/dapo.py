"""Reward: mathematics in DAPO's format (arXiv 2503.14476), 1 or -1 for the answer after the last `Answer:`.

As in DAPO, only the last 300 characters are read. Numbers are compared as numbers, other answers in a normal form.
"""

from typing import Any

from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.zoo.rewards.text import _answers

TAIL = 300


class Dapo(RewardWithExtras):
    """1 if the answer equals the metadata's `ground_truth`, else `wrong_score`; the extra `accuracy` is 1 or 0."""

    extras = ("accuracy",)

    def __init__(self, wrong_score: float = -1.0) -> None:
        self._wrong_score = wrong_score

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        right = []
        for completion, meta in zip(completions, metadata, strict=True):
            truth, answer = _answers.truth(meta, "dapo"), _answers.line(completion[-TAIL:])
            right.append(answer is not None and _answers.same(answer, truth))
        scores = [1.0 if each else self._wrong_score for each in right]
        return RewardOutput(scores, {"accuracy": [float(each) for each in right]})

    def answer(self, completion: str) -> str | None:
        """The answer of a solution, see GivesAnswers."""
        answer = _answers.line(completion[-TAIL:])
        return None if answer is None else _answers.canonical(answer)

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a ground truth."""
        _answers.truth(metadata, "dapo")
