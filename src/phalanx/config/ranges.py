"""Allowed values that several keys or modules share."""

from typing import Any

DTYPES = ("float32", "bfloat16")
SDE_TYPES = ("sde", "cps", "dance_sde")
SCHEDULES = ("synchronous", "pipelined", "one_step_off")
CORRECTIONS = ("rescore", "none", "truncated_is", "rejection")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
TOKEN_CORRECTIONS = ("token_tis", "sequence_tis", "token_mask", "sequence_mask")
ESTIMATES = ("trace", "block_mean_field", "mean_field", "coupled", "elbo")  # see phalanx.functional.block_states
COUNT: dict[str, Any] = {"ge": 1, "le": 65536}  # numbers of things that are made or kept at once
TIMES: dict[str, Any] = {"ge": 1, "le": 10_000}  # numbers of repetitions, one after the other, within a step
SEEDS: dict[str, Any] = {"ge": 0, "lt": 2**63}  # accepted by torch's generators and phalanx.distributed.seed
