"""Allowed values that several keys or modules share, and functions that check one value."""

from collections.abc import Callable, Sequence
from typing import Any

DTYPES = ("float32", "bfloat16")
FLOAT16 = ("float16", "fp16", "half")
NO_FLOAT16 = (  # a loss over thousands of tokens has gradients near float16's smallest number
    "float32, or bfloat16 on a GPU that computes in it; float16 would need a scaled loss, which is not supported"
)
SDE_TYPES = ("sde", "cps", "dance_sde")
SCHEDULES = ("synchronous", "pipelined", "one_step_off")
CORRECTIONS = ("rescore", "none", "truncated_is", "rejection")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TOKEN_CORRECTIONS = ("token_tis", "sequence_tis", "token_mask", "sequence_mask")
ESTIMATES = ("trace", "block_mean_field", "mean_field", "coupled", "elbo")  # see phalanx.functional.block_states
COUNT: dict[str, Any] = {"ge": 1, "le": 65536}  # numbers of things that are made or kept at once
TIMES: dict[str, Any] = {"ge": 1, "le": 10_000}  # numbers of repetitions, one after the other, within a step
SEEDS: dict[str, Any] = {"ge": 0, "lt": 2**63}  # accepted by torch's generators and phalanx.distributed.seed


def expect(words: str, right: Callable[[Any], Any]) -> Callable[[Any], str | None]:
    """For `arg(..., valid=...)`: returns the expected value in words unless `right` holds for a value."""
    return lambda value: None if right(value) else words


def some_of(names: Sequence[str]) -> Callable[[list[str]], str | None]:
    """For `arg(..., valid=...)`: at least one of these names, each at most once."""
    return expect(f"some of {', '.join(names)}", lambda v: v and len({*v}) == len(v) and {*v} <= {*names})


WARM = expect(
    "0, or at least 0.01, below which float32 always selects the most likely token", lambda v: not 0 < v < 0.01
)
BETAS = expect("two numbers in 0 .. 1, such as [0.9, 0.999]", lambda v: len(v) == 2 and min(v) >= 0 and max(v) < 1)
FREQUENCY = expect("-1 (never) or a number of steps", lambda v: v >= 1 or v == -1)
TEXTS = expect("texts that are not empty", lambda v: "" not in v)  # one would end each response at once
INTERVAL = expect("two numbers, the smaller first, such as [0, 1]", lambda v: len(v) == 2 and v[0] < v[1])
STEPS = expect("two numbers [a, b]", lambda v: len(v) == 2)
