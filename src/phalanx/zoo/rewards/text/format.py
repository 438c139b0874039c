"""Reward: the format of a completion, by default DeepSeek-R1's (arXiv 2501.12948): thoughts and an answer in tags."""

import re
from typing import Any

from phalanx.rewards.base import RewardOutput, RewardWithExtras
from phalanx.rewards.verifier import Verifier, with_unjudged

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Format(RewardWithExtras):
    """1 for a completion of the form <think>...</think><answer>...</answer> with each tag once, or, with `pattern`, for
    a completion that this regular expression matches as a whole (`.` also matches newlines); else 0.

    opened: the prompt already ends with <think>.
    timeout_s: seconds of CPU time per sample for `pattern`, since some expressions take exponential time; a sample that
        takes longer gets 0 and is counted by the extra `unjudged`.
    """

    def __init__(self, pattern: str | None = None, opened: bool = False, timeout_s: float = 1.0) -> None:
        if pattern is not None:
            try:
                re.compile(pattern, re.DOTALL)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"pattern={pattern!r} is not a valid regular expression: {error}") from None
        self._pattern, self._tags = pattern, TAGS[1:] if opened else TAGS
        self._verifier = Verifier("pattern", timeout_s)
        self.extras = () if pattern is None else Verifier.extras

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        if self._pattern is None:
            return RewardOutput([float(in_tags(completion, self._tags)) for completion in completions])
        judged = []
        for completion in completions:
            judged.append(self._verifier.judge(self._pattern, completion))
        return with_unjudged(judged)


def in_tags(text: str, tags: tuple[str, ...]) -> bool:
    """Whether the text has the tags in order, once each, with only white space outside the pairs."""
    if any(text.count(tag) != (tag in tags) for tag in TAGS):
        return False
    start = r"\s*<think>" if TAGS[0] in tags else ""
    return re.fullmatch(rf"{start}.*</think>\s*<answer>.*</answer>\s*", text, re.DOTALL) is not None
