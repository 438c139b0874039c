"""This rank's membership in a domain of the reward model, in which images are sent to the ranks that score them."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
        # gather needs the same shape on all ranks: the largest one
        sizes = self.all_gather([len(file) for file in files])
        padded = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)
        if len(padded) == 0:
            return []
        if files:
            joined = torch.frombuffer(bytearray().join(files), dtype=torch.uint8)
            padded[: len(joined)] = joined

        # one gather for each rank that has a part of the model; the others only send
        received: list[Tensor] = []
        for replica in self.domain.replicas:
            for holder in replica:
                is_holder = self.rank == holder
                box = [torch.empty_like(padded) for _ in sizes] if is_holder else None
                dist.gather(padded, box, dst=holder, group=self._group)
                received = box or received
        gathered = []
        for part, lengths in zip(received, sizes if received else [], strict=True):
            first = 0
            for length in lengths:
                gathered.append(part[first : first + length].numpy().tobytes())
                first += length
        return gathered
