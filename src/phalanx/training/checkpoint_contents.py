"""The contents of a checkpoint, as DTensors by name, and the part of them that a rank writes."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.distributed.fsdp import as_part_of
from phalanx.distributed.mesh import World


def trained_state(
    parameters: dict[str, Tensor], optimizer: dict[str, dict[str, Tensor]], averages: dict[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """The contents of a checkpoint as DTensors, to save or to load into. averages: other weights by name."""
    # Moments and averages are local tensors. As shards of DTensors they are saved only once, and can be loaded into any
    # other layout. AdamW's step count is a scalar, equal on all ranks.
    moments: dict[str, dict[str, Tensor]] = {}
    for name, p in parameters.items():
        moments[name] = {}
        for key, value in optimizer[name].items():
            moments[name][key] = value if value.dim() == 0 else as_part_of(value, p)
    state: dict[str, Any] = {"model": {name: p.detach() for name, p in parameters.items()}, "optim": moments}
    for average, values in averages.items():
        state[average] = {name: as_part_of(value, parameters[name]) for name, value in values.items()}
    return state


def share(state: dict[str, Any], world: World, bytes_of: list[int] | None = None) -> dict[str, Any]:
    """The part of a checkpoint's contents that this rank writes; each shard is written by one rank.

    bytes_of: what each replica of the weights writes so far; the next tensor goes to the one with the least.
    """
    # torch would remove duplicates from the plans of all ranks, for which rank 0 unpickles them, 0.4 s of CPU each
    replicas, shards, written = world.mesh["replicate"], world.mesh["shard"], dict[str, Any]()
    bytes_of = [0] * replicas.size() if bytes_of is None else bytes_of
    for number, (name, value) in enumerate(state.items()):
        if isinstance(value, dict):
            part = share(value, world, bytes_of)
            written |= {name: part} if part else {}  # DCP would save an empty one as a pickle
            continue
        replica = bytes_of.index(min(bytes_of))
        bytes_of[replica] += value.numel() * value.dtype.itemsize
        # what is not sharded is the same on all ranks of a replica
        one_of_them = isinstance(value, DTensor) or shards.get_local_rank() == number % shards.size()
        if replicas.get_local_rank() == replica and one_of_them:
            written[name] = value
    return written
