"""Collectives among the ranks of one node."""

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.mesh import World, group_of


class Node:
    """The `ranks` of this node, and this rank's `place` among them. All ranks of the world create one at the same
    point, and all ranks of the node call its methods together.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        launch = world.launch
        size = launch.local_world_size
        self.place = launch.rank % size  # not local_rank, which also counts the node's ranks of other roles
        first = launch.rank - self.place
        self.ranks = range(first, first + size)
        self._group: dist.ProcessGroup | None = None  # None: the world's group, if there is only one node
        if size in (1, launch.world_size):
            return
        if size == world.shard_size:
            self._group = world.mesh.get_group("shard")
        else:
            self._group = group_of(self.ranks, timeout_s)

    def all_gather(self, value: Tensor) -> Tensor:
        """Stack CPU tensors of the same shape from all ranks of the node, in rank order."""
        if len(self.ranks) == 1:
            return value[None]
        stacked = value.new_empty(len(self.ranks), *value.shape)
        dist.all_gather(list(stacked), value.contiguous(), group=self._group)
        return stacked

    def exchange(self, parcels: list[bytes]) -> list[bytes]:
        """Send parcels[i] to the node's rank i; returns the received parcels, in rank order."""
        if len(self.ranks) == 1:
            return parcels
        sizes = torch.tensor(list(map(len, parcels)))
        received = self.all_gather(sizes)[:, self.place].tolist()
        # torch.frombuffer does not accept an empty buffer
        sent = torch.frombuffer(bytearray(b"".join(parcels) or b"\0"), dtype=torch.uint8)[: int(sizes.sum())]
        box = torch.empty(sum(received), dtype=torch.uint8)
        dist.all_to_all_single(box, sent, received, sizes.tolist(), group=self._group)
        return [part.numpy().tobytes() for part in box.split(received)]
