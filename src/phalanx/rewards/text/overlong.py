"""Overlong shaping: a soft punishment of responses near the limit of length (DAPO, arXiv 2503.14476, equation 13)."""

from collections.abc import Mapping, Sequence
from typing import Any


class Overlong:
    """0 up to `overlong_buffer_len` tokens before the limit, from there on a straight line down to -1 at the limit.

    The limit is that of the sampling, `max_response_length` of the metadata, where a rollout of language models puts it
    beside `response_length`. The weight of the reward's entry is the penalty's factor.
    """

    def __init__(self, overlong_buffer_len: int) -> None:
        if overlong_buffer_len < 1:
            raise ValueError(f"overlong_buffer_len={overlong_buffer_len} should be at least 1")
        self.buffer = overlong_buffer_len

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        scores = []
        for meta in metadata:
            if "response_length" not in meta:
                raise ValueError("overlong needs the response_length and max_response_length of a training job")
            into = meta["response_length"] - (meta["max_response_length"] - self.buffer)
            scores.append(-min(max(into / self.buffer, 0.0), 1.0))
        return scores
