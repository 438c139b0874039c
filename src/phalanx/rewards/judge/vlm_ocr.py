"""Reward: how well a vision-language model reads the prompt's text in the image, as in VeRL-Omni's FlowGRPO recipes.

`1 - min(1, Levenshtein(answer, target) / len(target))`, and 1 where the target is a part of the answer; both without
white space around them and in lower case. The target is `metadata["ground_truth"]`.
"""

from typing import Any

from phalanx.rewards._recall import KINDS, matched
from phalanx.rewards.base import ground_truth
from phalanx.rewards.judge._base import Judge


class VlmOcr(Judge):
    """Asks the reward model for the text in the image.

    strict: a target that is merely a part of the answer is no full score, which would reward images full of text.
    recall, column: as those of the reward ocr.
    """

    template = "Please output only the text content from the image without any additional descriptions or formatting."

    def __init__(self, strict: bool = False, recall: str | None = None, column: str = "ground_truth") -> None:
        if recall not in (None, *KINDS):
            raise ValueError(f"recall={recall!r}; expected words or characters")
        self._strict, self._recall, self._column = strict, recall, column

    def question(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The same for all images; ValueError for one without a target, before the model is asked."""
        self.check_row(prompt, metadata)
        return self.template

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a target."""
        target = ground_truth(prompt, metadata, self._column)
        if self._recall is not None and not matched(target, "", self._recall)[1]:
            raise ValueError(f"{self._column} {target!r} has no letters or digits that recall could count")

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float:
        """The score in 0..1: every answer is a reading, an empty one too."""
        from rapidfuzz.distance import Levenshtein

        truth = ground_truth(prompt, metadata, self._column)
        if self._recall is not None:
            right, expected = matched(truth, answer, self._recall)
            return right / expected
        target, read = (text.strip().lower() for text in (truth, answer))
        if target in read and not self._strict:
            return 1.0
        return 1.0 - min(1.0, Levenshtein.distance(target, read) / len(target))
