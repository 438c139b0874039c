"""This rank's membership in a domain of the reward model, in which images are sent to the ranks that score them."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeVar

import torch.distributed as dist

from phalanx.distributed.mesh import group_of
from phalanx.distributed.placement import Domain

T = TypeVar("T")


class DomainRank:
    """One rank of `domain`, with the CPU group of its ranks. All ranks of the world create one at the same point.

    `replica` is the number of the replica to which this rank belongs; None if it has no part of the model.
    """

    def __init__(self, domain: Domain, timeout_s: float) -> None:
        self.domain = domain
        self.rank = dist.get_rank()
        self.replica = next((i for i, ranks in enumerate(domain.replicas) if self.rank in ranks), None)
        # gloo also with GPUs: the data is in CPU memory, and NCCL is left to training
        self._group = group_of(domain.ranks, timeout_s)

    @property
    def position(self) -> int:
        """This rank's index in the domain."""
        return self.domain.ranks.index(self.rank)

    def all_gather(self, value: T) -> list[T]:
        """Values of all ranks of the domain, in rank order. For small picklable values."""
        out: list[Any] = [None] * len(self.domain.ranks)
        dist.all_gather_object(out, value, group=self._group)
        return out

    def gather_files(self, files: Sequence[bytes]) -> list[bytes]:
        """Files of all ranks, in rank order, on the ranks that have the model; an empty list on the others."""
        received: list[Any] = []
        for holder in chain.from_iterable(self.domain.replicas):
            box: list[Any] | None = [None] * len(self.domain.ranks) if self.rank == holder else None
            dist.gather_object(list(files), box, dst=holder, group=self._group)
            received = box or received
        return list(chain.from_iterable(received))
