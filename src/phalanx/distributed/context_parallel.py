"""Context parallelism of flow models: neighbouring ranks hold the same samples, and each a part of their tokens.

Around each attention they exchange tokens for heads (Ulysses, arXiv 2309.14509). Weights lie over all ranks as they do
without it: a rank's gradient is the part that comes from its own tokens, so the sum over all ranks is the whole one.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRunConfig
from phalanx.config.run import ParallelConfig, RunConfig
from phalanx.distributed.launch import Launch
from phalanx.distributed.placement import near_divisors
from phalanx.distributed.roles import Roles

KEY = "parallel.ulysses_sequence_parallel_size"


def check_context(cfg: RunConfig, roles: Roles, launch: Launch) -> None:
    """Refuse what the job or its launch does not allow (ConfigError)."""
    size = cfg.parallel.ulysses_sequence_parallel_size
    if size == 1:
        return
    if not isinstance(cfg, FlowRunConfig):
        raise ConfigError(f"{KEY}: {size} is of flow models, such as Wan and Qwen-Image; set it to 1")
    if not roles.collocated:
        raise ConfigError(f"{KEY}: {size} has no way with placement; set one of them back to its default")
    if cfg.rollout.facts.weights == "copy":
        raise ConfigError(f"{KEY}: {size} samples in the policy itself; set rollout.engine=policy")
    if cfg.model.compile:
        raise ConfigError(
            f"{KEY}: {size} exchanges tokens within blocks, which are not compiled; set model.compile=false"
        )
    if launch.local_world_size % size:
        near = near_divisors(launch.local_world_size, size)
        raise ConfigError(
            f"{KEY}: {size} does not divide the {launch.local_world_size} ranks of a node; nearest that does: {near}"
        )


def context_mesh(config: ParallelConfig, ranks: int, device: torch.device) -> DeviceMesh | None:
    """The mesh (data, ring, ulysses) of all ranks, as diffusers wants it, without a ring; None where each rank has
    samples of its own.
    """
    size = config.ulysses_sequence_parallel_size
    if size == 1:
        return None
    return init_device_mesh(device.type, (ranks // size, 1, size), mesh_dim_names=("data", "ring", "ulysses"))


def context_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """All groups of that mesh that are used, with the one that diffusers will ask for."""
    return [] if mesh is None else [*mesh.get_all_groups(), mesh["ring", "ulysses"]._flatten().get_group()]
