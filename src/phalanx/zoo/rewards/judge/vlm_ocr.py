"""Reward: how well a vision-language model reads the prompt's text in the image, as in VeRL-Omni's FlowGRPO recipes.

`1 - min(1, Levenshtein(answer, target) / len(target))`, or 1 if the answer contains the target; both are stripped and
in lower case. The target is `metadata["ground_truth"]`.
"""

from typing import Any

from phalanx.rewards.judge import Judge
from phalanx.zoo.rewards._recall import Kind, matched, target_of


class VlmOcr(Judge):
    """Asks the reward model for the text in the image.

    strict: an answer that merely contains the target does not score 1, because this rewards images full of text.
    recall, column: see the reward ocr.
    """

    template = "Please output only the text content from the image without any additional descriptions or formatting."

    def __init__(self, strict: bool = False, recall: Kind | None = None, column: str = "ground_truth") -> None:
        self._strict, self._recall, self._column = strict, recall, column

    def question(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The question, which is the same for all images. Raises ValueError for a row without a target."""
        self.check_row(prompt, metadata)
        return self.template

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a target."""
        target_of(prompt, metadata, self._column, self._recall)

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float:
        """The score in 0..1; every answer, even an empty one, counts as a reading."""
        from rapidfuzz.distance import Levenshtein

        truth = target_of(prompt, metadata, self._column, self._recall)
        if self._recall is not None:
            right, expected = matched(truth, answer, self._recall)
            return right / expected
        target, read = (text.strip().lower() for text in (truth, answer))
        if target in read and not self._strict:
            return 1.0
        return 1.0 - min(1.0, Levenshtein.distance(target, read) / len(target))
