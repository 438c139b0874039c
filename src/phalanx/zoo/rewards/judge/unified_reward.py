"""Reward: grades of a vision-language model for alignment, coherence and style.

The axes and the format of the answer are those of UnifiedReward (arXiv 2503.05236), which does not depend on the
wording of the question; the wording here is our own. Other instruction-tuned models answer it as well. The score is the
weighted mean of (grade - 1) / 4, for grades from 1 to 5.
"""

import re
from typing import Any

from phalanx.rewards.judge import Judge

AXES = ("alignment", "coherence", "style")
_GRADE = r"{axis}\s{{1,9}}score\W{{0,9}}(?:1\s{{0,9}}-\s{{0,9}}5\W{{0,9}})?:\W{{0,9}}(\d+(?:\.\d+)?)"  # bounded: linear


class UnifiedReward(Judge):
    """`axes`: the weight of each axis in the mean, such as {alignment: 2, style: 1}; default: equal weights."""

    template = (
        "An image generator was given this caption:\n[{prompt}]\n\n"
        "Grade the image that it made on three axes, each with a number from 1 (worst) to 5 (best):\n"
        "- Alignment: does the image show what the caption asks for?\n"
        "- Coherence: does everything in it make sense, without malformed objects, artefacts or contradictions?\n"
        "- Style: is it a beautiful picture, even if the caption asks for another one?\n\n"
        "Answer with the following three lines, your grades in the place of X, Y and Z:\n"
        "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z"
    )

    def __init__(self, axes: dict[str, float] | None = None) -> None:
        self._weights = dict.fromkeys(AXES, 1.0) if axes is None else dict(axes)
        unknown = [axis for axis in self._weights if axis not in AXES]
        if unknown or not self._weights or min(self._weights.values()) <= 0:
            raise ValueError(f"axes {axes}: expected positive weights of {', '.join(AXES)}, or of some of them")

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """The score in 0..1, from the last grade of each axis; None if one is missing or not within 1 to 5."""
        total = 0.0
        for axis, weight in self._weights.items():
            grades = re.findall(_GRADE.format(axis=axis), answer, re.IGNORECASE)
            if not grades or not 1 <= float(grades[-1]) <= 5:
                return None
            total += weight * (float(grades[-1]) - 1) / 4
        return total / sum(self._weights.values())
