"""A reward whose feedback on a wrong answer is the hint in the data, for learn_self.py."""

from typing import Any

from phalanx.rewards import RewardOutput
from phalanx.zoo.rewards.text.gsm8k import Gsm8k

_GSM8K = Gsm8k()


def gsm8k(completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
    """1 for a right answer, 0 and the row's hint, if it has one, for a wrong one."""
    scores: Any = _GSM8K(completions, prompts, metadata)
    feedback = [None if score else row.get("hint") for score, row in zip(scores, metadata, strict=True)]
    return RewardOutput(scores, feedback=feedback)
