"""This rank's part in a domain of the reward model: images go to the ranks that score them, answers come back."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.mesh import group_of
from phalanx.distributed.placement import Domain

T = TypeVar("T")


class DomainRank:
    """One rank of `domain`, and the CPU group of its ranks. All ranks of the world make theirs at the same point.

    `replica` is the number of the replica that this rank is part of, None where it holds no part of the model.
    """

    def __init__(self, domain: Domain, timeout_s: float) -> None:
        self.domain = domain
        self.rank = dist.get_rank()
        self.replica = next((i for i, ranks in enumerate(domain.replicas) if self.rank in ranks), None)
        # gloo on GPUs too: what travels lies in the CPU's memory, and NCCL is left to the training
        self._group = group_of(domain.ranks, timeout_s)

    @property
    def position(self) -> int:
        """This rank's place among those of the domain."""
        return self.domain.ranks.index(self.rank)

    def all_gather(self, value: T) -> list[T]:
        """The value of every rank of the domain, in the order of ranks. For small picklable values."""
        out: list[Any] = [None] * len(self.domain.ranks)
        dist.all_gather_object(out, value, group=self._group)
        return out

    def gather_files(self, files: Sequence[bytes]) -> list[bytes]:
        """The files of all ranks, one rank's after the other's, where the model is; nothing elsewhere."""
        # gather wants the same shape of all: the largest one
        sizes = self.all_gather([len(file) for file in files])
        padded = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)
        if len(padded) == 0:
            return []
        if files:
            joined = torch.frombuffer(bytearray().join(files), dtype=torch.uint8)
            padded[: len(joined)] = joined

        # one gather for each rank that holds a part of the model; the others only send
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
