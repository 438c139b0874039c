"""This rank's part in a domain of the reward model: images go to the ranks that score them, answers come back."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.mesh import group_timeout
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
        self._group = dist.new_group(
            list(domain.ranks), group_timeout(timeout_s), backend="gloo", use_local_synchronization=True
        )

    @property
    def position(self) -> int:
        """This rank's place among those of the domain."""
        return self.domain.ranks.index(self.rank)

    def all_gather(self, value: T) -> list[T]:
        """The value of every rank of the domain, in the order of ranks. For small picklable values."""
        out: list[Any] = [None] * len(self.domain.ranks)
        dist.all_gather_object(out, value, group=self._group)
        return out

    def gather_images(self, images: Tensor) -> Tensor | None:
        """Images uint8 [b, C, H, W] of all ranks as [N, C, H, W], in the order of ranks, where the model is; else None.

        b may differ from rank to rank, and be 0; the other sizes are equal where it is not.
        """
        # gather wants the same shape of all: the largest one, which is that of a rank with most images
        shapes = self.all_gather(tuple(images.shape))
        padded = torch.zeros(max(shapes), dtype=torch.uint8)
        if len(images) > 0:
            padded[: len(images)] = images

        # one gather for each rank that holds a part of the model; the others only send
        received: list[Tensor] | None = None
        for replica in self.domain.replicas:
            for holder in replica:
                is_holder = self.rank == holder
                box = [torch.empty_like(padded) for _ in shapes] if is_holder else None
                dist.gather(padded, box, dst=holder, group=self._group)
                received = box if is_holder else received
        if received is None:
            return None
        return torch.cat([part[: shape[0]] for part, shape in zip(received, shapes, strict=True)])
