"""Reward: the form of a completion, by default DeepSeek-R1's (arXiv 2501.12948): thoughts, then an answer, in tags."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from phalanx.rewards.base import RewardOutput
from phalanx.rewards.text._process import Verifier, VerifierError, scored

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


class Format:
    """1 for a completion of the form <think>...</think><answer>...</answer>, each tag once, or with `pattern` for one
    that this regular expression matches as a whole (a point stands for a newline too); else 0.

    opened: the prompt ends in <think> already. timeout_s: seconds that `pattern` has for a sample, which has no score
    where they do not do: some expressions take longer than the universe.
    """

    def __init__(self, pattern: str | None = None, opened: bool = False, timeout_s: float = 1.0) -> None:
        if pattern is not None:
            try:
                re.compile(pattern, re.DOTALL)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from None
        self._pattern, self._tags = pattern, TAGS[1:] if opened else TAGS
        self._verifier = Verifier("pattern", timeout_s)

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> RewardOutput:
        return scored([self._score(completion) for completion in completions])

    def _score(self, text: str) -> float | VerifierError:
        if self._pattern is None:
            return float(in_tags(text, self._tags))
        try:
            return float(self._verifier.ask(self._pattern, text))
        except VerifierError as error:
            return error


def in_tags(text: str, tags: Sequence[str]) -> bool:
    """Whether the tags stand in the text, in order and once each, with nothing but white space outside the pairs."""
    if any(text.count(tag) != (tag in tags) for tag in TAGS):
        return False
    places = [text.index(tag) for tag in tags]
    if places != sorted(places) or not text.strip().endswith(TAGS[3]):
        return False
    if len(tags) == len(TAGS) and not text.strip().startswith(TAGS[0]):
        return False
    between = text[text.index(TAGS[1]) + len(TAGS[1]) : text.index(TAGS[2])]
    return not between.strip()
