"""The world: one mesh (replicate, shard), and the groups that are cut from it. All process groups are made here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from phalanx.config import ConfigError
from phalanx.config.schema import ParallelConfig


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment says of this process; one process alone where it says nothing."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Launch":
        world = int(env.get("WORLD_SIZE", "1"))
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=world,
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", str(world))),
        )


@dataclass(frozen=True)
class World:
    """This process's place: `mesh` has axes (replicate, shard); `checkpoint_group` is a CPU group of all ranks."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    checkpoint_group: dist.ProcessGroup

    @property
    def shard_size(self) -> int:
        """Ranks that share one copy of the weights."""
        return self.mesh["shard"].size()


def shard_size(config: ParallelConfig, launch: Launch) -> int:
    """The width of the shard axis; raises ConfigError where it does not divide the world."""
    width = config.fsdp_size or launch.local_world_size
    if launch.world_size % width:
        fitting = [n for n in range(1, launch.world_size + 1) if launch.world_size % n == 0]
        below, above = (
            max(n for n in fitting if n <= max(width, 1)),
            min((n for n in fitting if n >= width), default=fitting[-1]),
        )
        near = " or ".join(str(n) for n in sorted({below, above}))
        raise ConfigError(
            f"parallel.fsdp_size: {width} does not divide the world's {launch.world_size} ranks; "
            f"nearest that does: {near}"
        )
    return width


def check_sharding(optimizer: str, config: ParallelConfig, launch: Launch) -> None:
    """Refuse an optimizer or an offload that this world's sharding does not allow (ConfigError)."""
    width = shard_size(config, launch)
    if config.param_offload and width == 1:
        raise ConfigError(
            "parallel.param_offload: true needs parallel.fsdp_size > 1; replicated weights stay on the device"
        )
    if optimizer == "muon" and width > 1:
        raise ConfigError(
            f"optim.name: 'muon' orthogonalises whole matrices, which {width} ranks share here; "
            "set parallel.fsdp_size=1 or optim.name=adamw"
        )


def start(config: ParallelConfig) -> World:
    """Join the world and cut its mesh. Every group gets the configured time limit."""
    launch = Launch.from_env()
    width = shard_size(config, launch)
    timeout = timedelta(seconds=config.timeout_s)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", launch.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (launch.world_size // width, width), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():  # subgroups do not inherit the limit of the default group
        _set_pg_timeout(timeout, group)
    checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)
    return World(launch.rank, launch.world_size, device, mesh, checkpoint_group)


def stop() -> None:
    """Leave the world."""
    if dist.is_initialized():
        dist.destroy_process_group()
