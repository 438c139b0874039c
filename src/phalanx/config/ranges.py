"""Allowed values that several keys share."""

from typing import Any

DTYPES = ("float32", "bfloat16")
COUNT: dict[str, Any] = {"ge": 1, "le": 65536}  # numbers of things that are made or kept at once
TIMES: dict[str, Any] = {"ge": 1, "le": 10_000}  # numbers of repetitions, one after the other, within a step
SEEDS: dict[str, Any] = {"ge": 0, "lt": 2**63}  # accepted by torch's generators and phalanx.distributed.seed
