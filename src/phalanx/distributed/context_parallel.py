"""Context parallelism of flow models: neighbouring ranks hold the same samples, and each a part of their tokens.

Around each attention they exchange tokens for heads (Ulysses, arXiv 2309.14509). Weights lie over all ranks as they do
without it: a rank's gradient is the part that comes from its own tokens, so the sum over all ranks is the whole one.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.config.run import ParallelConfig

KEY = "parallel.ulysses_sequence_parallel_size"


def context_mesh(config: ParallelConfig, ranks: int, device: torch.device) -> DeviceMesh | None:
    """The mesh (data, ring, ulysses) of all ranks, as diffusers wants it, without a ring; None where all ranks have
    different samples.
    """
    size = config.ulysses_sequence_parallel_size
    if size == 1:
        return None
    return init_device_mesh(device.type, (ranks // size, 1, size), mesh_dim_names=("data", "ring", "ulysses"))


def context_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """All groups of that mesh that are used, with the one that diffusers will ask for."""
    return [] if mesh is None else [*mesh.get_all_groups(), mesh["ring", "ulysses"]._flatten().get_group()]
