"""Values that keys of several sections may have."""

from typing import Any

DTYPES = ("float32", "bfloat16")
COUNT: dict[str, Any] = {"ge": 1, "le": 65536}  # of what is made or held at once
TIMES: dict[str, Any] = {"ge": 1, "le": 10_000}  # of what is done one after the other in a step
SEEDS: dict[str, Any] = {"ge": 0, "lt": 2**63}  # what torch's generators and phalanx.distributed.seed take
