"""The launcher's environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """This process's rank and world size according to the launcher's environment; without one, a single process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    max_restarts: int = 0  # how often the launcher may start the ranks again
    nodes: str = ""  # the range of nodes of an elastic job, such as 2:4

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Launch":
        """Read torchrun's variables, such as RANK. Raises ValueError if one of them is not an integer."""
        world = int(env.get("WORLD_SIZE", "1"))
        # train.sh exports NNODES as the user gave it: only a range makes the job elastic
        nodes = env.get("NNODES", "")
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=world,
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", str(world))),
            max_restarts=int(env.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            nodes=nodes if ":" in nodes else f"1:{nodes}" if env.get("IN_PLACE") == "1" and world > 1 else "",
        )

    @property
    def alone(self) -> bool:
        """Whether this rank is the whole job, whose store then needs no port, which another job could have taken."""
        return self.rank == 0 and self.world_size == 1

    def worlds(self) -> list[int]:
        """World sizes that an elastic job may have as nodes join and leave; for other jobs the present size."""
        if not self.nodes:
            return [self.world_size]
        first, last = map(int, self.nodes.split(":"))
        return [n * self.local_world_size for n in range(first, last + 1)]
