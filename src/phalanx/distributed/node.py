"""Collectives of the ranks of one node."""

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.mesh import World, group_of


class Node:
    """`ranks` by their numbers, and this one's `place` among them. All ranks of the world make theirs at the same
    point, and a call is one of all ranks of the node.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        launch = world.launch
        size = launch.local_world_size
        self.place = launch.rank % size  # not by local_rank, which counts the node's ranks of other roles as well
        first = launch.rank - self.place
        self.ranks = range(first, first + size)
        self._group: dist.ProcessGroup | None = None  # that of the world, where it is one node
        if size in (1, launch.world_size):
            return
        if size == world.shard_size:
            self._group = world.mesh.get_group("shard")
        else:
            self._group = group_of(self.ranks, timeout_s)

    def all_gather(self, value: Tensor) -> Tensor:
        """Every rank's CPU tensor of one shape, stacked in the order of ranks."""
        if len(self.ranks) == 1:
            return value[None]
        stacked = value.new_empty(len(self.ranks), *value.shape)
        dist.all_gather(list(stacked), value.contiguous(), group=self._group)
        return stacked

    def exchange(self, parcels: list[bytes]) -> list[bytes]:
        """Send each rank its parcel; returns the received ones, in the order of ranks."""
        if len(self.ranks) == 1:
            return parcels
        sizes = torch.tensor(list(map(len, parcels)))
        received = self.all_gather(sizes)[:, self.place].tolist()
        # a tensor of no bytes could not be made of a buffer
        sent = torch.frombuffer(bytearray(b"".join(parcels) or b"\0"), dtype=torch.uint8)[: int(sizes.sum())]
        box = torch.empty(sum(received), dtype=torch.uint8)
        dist.all_to_all_single(box, sent, received, sizes.tolist(), group=self._group)
        return [part.numpy().tobytes() for part in box.split(received)]
