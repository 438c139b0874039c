"""Reward: the length of a completion in characters or words, for use beside other terms."""

from typing import Any, Literal

from pydantic import PositiveFloat


class Length:
    """The number n of characters or words, which a negative weight penalises; with `target`, the negative relative
    distance to it, max(-|n - target| / target, -1).
    """

    def __init__(
        self, unit: Literal["characters", "words"] = "characters", target: PositiveFloat | None = None
    ) -> None:
        self._unit, self._target = unit, target

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        counts = [len(text) if self._unit == "characters" else len(text.split()) for text in completions]
        if self._target is None:
            return [float(count) for count in counts]
        return [-min(1.0, abs(count - self._target) / self._target) for count in counts]
