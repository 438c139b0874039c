"""Reward: soft penalty for responses close to the length limit (DAPO, arXiv 2503.14476, equation 13)."""

from typing import Any

from pydantic import PositiveInt


class Overlong:
    """0 up to `overlong_buffer_len` tokens before the limit, then decreasing linearly to -1 at the limit.

    The limit is that of sampling: rollouts of language models add `max_response_length` and `response_length` to the
    metadata. The weight of the reward's entry is the penalty factor.
    """

    def __init__(self, overlong_buffer_len: PositiveInt) -> None:
        self.buffer = overlong_buffer_len

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        scores = []
        for meta in metadata:
            if "response_length" not in meta:
                raise ValueError("overlong needs the response_length and max_response_length of a training job")
            into = meta["response_length"] - (meta["max_response_length"] - self.buffer)
            scores.append(-min(max(into / self.buffer, 0.0), 1.0))
        return scores
