"""The world: one mesh (replicate, shard), and the groups that are cut from it. All process groups are made here."""

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from phalanx.config import ConfigError
from phalanx.config.schema import ParallelConfig, RunConfig
from phalanx.distributed import watch
from phalanx.distributed.collectives import all_gather_object, broadcast_object

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment says of this process; one process alone where it says nothing."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    max_restarts: int = 0  # how often the launcher may start the ranks again
    nodes: str = ""  # of an elastic job: the range of nodes, such as 2:4

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Launch":
        world = int(env.get("WORLD_SIZE", "1"))
        return cls(
            rank=int(env.get("RANK", "0")),
            world_size=world,
            local_rank=int(env.get("LOCAL_RANK", "0")),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", str(world))),
            max_restarts=int(env.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            nodes=env.get("NNODES", "") if ":" in env.get("NNODES", "") else "",
        )

    def worlds(self) -> list[int]:
        """How many ranks the world may have, in an elastic job, as nodes come and go."""
        if not self.nodes:
            return [self.world_size]
        first, last = (int(n) for n in self.nodes.split(":"))
        return [n * self.local_world_size for n in range(first, last + 1)]


@dataclass(frozen=True)
class World:
    """This process's place: `mesh` has axes (replicate, shard); `checkpoint_group` is a CPU group of all ranks;
    `watch` hears signals and knows which ranks live.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    checkpoint_group: dist.ProcessGroup
    watch: watch.Watch

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


def check_elastic(cfg: RunConfig, launch: Launch, works: Callable[[int], object]) -> None:
    """Refuse what a job whose ranks are started again cannot do, and warn of worlds that it may come to but not run in.

    `works(world_size)` raises ConfigError for such a world.
    """
    resume = cfg.trainer.resume
    if resume != "auto" and (launch.max_restarts > 0 or launch.nodes):
        raise ConfigError(
            f"trainer.resume: {resume!r} would begin from there again whenever the ranks are restarted (MAX_RESTARTS, "
            "or a range of NNODES); right is auto, with a trainer.output_dir of its own"
        )
    for size in launch.worlds():
        if size != launch.world_size:
            try:
                check_sharding(cfg.optim.name, cfg.parallel, replace(launch, world_size=size))
                works(size)
            except ConfigError as error:
                log.warning("NNODES=%s: with %d ranks the job would end: %s", launch.nodes, size, error)


def group_timeout(timeout_s: float) -> timedelta:
    """The time limit of a process group. NCCL ends the process at its own; the watch is to name the lost rank first."""
    return timedelta(seconds=timeout_s + (30 if torch.cuda.is_available() else 0))


def start(config: ParallelConfig) -> World:
    """Join the world and cut its mesh. Every group gets the configured time limit."""
    launch = Launch.from_env()
    width = shard_size(config, launch)
    cuda = torch.cuda.is_available()
    # NCCL's own end at its limit is an abort without words, so the watch, which names the lost ranks, comes first
    timeout = group_timeout(config.timeout_s)
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
    return World(launch.rank, launch.world_size, device, mesh, checkpoint_group, _watch(launch, config.timeout_s))


def _watch(launch: Launch, timeout_s: float) -> watch.Watch:
    """The watch of this rank, over connections of its own to the store that the world was made with."""
    node = launch.rank // launch.local_world_size
    alone = launch.world_size == launch.local_world_size
    hosts = all_gather_object(socket.gethostname() if alone else f"{socket.gethostname()} (node {node})")
    name = broadcast_object(uuid.uuid4().hex)  # a store may outlive a restart of the ranks
    stores: list[dist.Store] = []
    if launch.world_size > 1 and "MASTER_ADDR" in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        for _ in range(2):
            client = dist.TCPStore(address, port, wait_for_workers=False, timeout=timedelta(seconds=10))
            stores.append(dist.PrefixStore(f"watch/{name}", client))
    first = launch.rank - launch.local_rank
    local = range(first, first + launch.local_world_size)
    found = watch.current = watch.Watch(launch.rank, hosts, local, timeout_s, *stores)
    dist.barrier()
    if stores:
        found.start()
    return found


def stop() -> None:
    """Leave the world."""
    if watch.current is not None:
        watch.current.close()
    if dist.is_initialized():
        dist.destroy_process_group()
