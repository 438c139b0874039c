"""The world of a rank: one mesh (replicate, shard) and its process groups.

Process groups are created only in `distributed/`, at points that all ranks reach: creating a group on only some of its
ranks would hang, and a group created elsewhere would not have the job's time limit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from phalanx.config.messages import check_divides
from phalanx.config.parallel import ParallelConfig
from phalanx.distributed.launch_env import Launch

ACTOR, ROLLOUT, INFERENCE = ROLES = ("actor", "rollout", "inference")
CHECKPOINT_S = 7200.0  # minimum time limit of the group that writes checkpoints
# public since torch 2.14
SET_TIMEOUT = "set_timeout" if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) else "_set_pg_timeout"


class Watch(Protocol):
    """The watch beside a rank, see phalanx.run.watchdog. hosts: the machine of each rank. interval: seconds between
    heartbeats. stop: the signal that asked this rank to stop, None before.
    """

    rank: int
    hosts: Sequence[str]
    interval: float
    stop: Any

    def listen(self) -> None: ...
    def ask(self) -> None: ...
    def close(self) -> None: ...
    def fail(self, error: str, gone: int = 0) -> NoReturn: ...


class Link(Protocol):
    """The connection of a rank to those of other roles, see phalanx.run.link. world_size: ranks of all roles."""

    role: str
    world_size: int

    def meet(self) -> None: ...


@dataclass(frozen=True)
class World:
    """This process's view of the world.

    mesh: has the axes (replicate, shard). checkpoint_group: a CPU group of all ranks. watch: receives signals and knows
    which ranks are alive. If ranks have different roles, everything but the watch describes the ranks of one role, as
    if they were launched separately (`launch`), and `link` connects them to the other roles.
    context: under context parallelism, a second mesh of the same ranks; see phalanx.distributed.context_parallel.
    context_size: number of neighbouring ranks that share the same samples. data_size: number of groups of ranks with
    different samples. data_rank: index of this rank's group among them.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    checkpoint_group: dist.ProcessGroup
    watch: Watch
    launch: Launch
    link: Link | None = None
    context: DeviceMesh | None = None
    context_size: int = field(init=False)
    data_rank: int = field(init=False)
    data_size: int = field(init=False)

    def __post_init__(self) -> None:
        width = 1 if self.context is None else self.context.shape[-1]
        vars(self).update(context_size=width, data_rank=self.rank // width, data_size=self.size // width)

    @property
    def role(self) -> str:
        """The role of this rank; `actor` if all ranks do everything."""
        return ACTOR if self.link is None else self.link.role

    @property
    def samples(self) -> bool:
        """Whether this rank samples."""
        return self.link is None or self.link.role == ROLLOUT

    @property
    def lead(self) -> bool:
        """Whether this rank prints the job's messages and writes its files."""
        return self.role == ACTOR and self.rank == 0

    @property
    def shard_size(self) -> int:
        """Number of ranks that share one copy of the weights."""
        return self.mesh.size(1)  # also after its groups were aborted


def shard_size(config: ParallelConfig, launch: Launch) -> int:
    """The width of the shard axis. Raises ConfigError if it does not divide the number of ranks."""
    # One node by default: weights are gathered at every block, which needs the fast links within a node, while
    # gradients cross nodes only once per optimizer step.
    width = config.fsdp_size or launch.local_world_size
    check_divides("parallel.fsdp_size", width, launch.world_size, "the world's {} ranks")
    return width


def group_timeout(timeout_s: float) -> timedelta:
    """The time limit of a process group."""
    # At its limit, NCCL aborts the process from another thread without naming the missing ranks. The watch can name
    # them, so it gets 30 s more.
    return timedelta(seconds=timeout_s + (30 if torch.cuda.is_available() else 0))


def group_of(ranks: Sequence[int], timeout_s: float, backend: str = "gloo") -> dist.ProcessGroup:
    """Create the group of the `ranks`, which include this one. Other ranks need not call this."""
    group = dist.new_group(
        list(ranks), timeout=group_timeout(timeout_s), backend=backend, use_local_synchronization=True
    )
    assert isinstance(group, dist.ProcessGroup)  # a rank outside the group would get an integer
    return group


class Node:
    """The `ranks` of this node, and this rank's `place` among them. All ranks of the world create one at the same
    point, and all ranks of the node call its method together.
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
        stacked = value.new_empty(len(self.ranks), *value.shape)
        dist.all_gather(list(stacked), value.contiguous(), group=self._group)
        return stacked


def role_width(config: ParallelConfig, launch: Launch, role: str) -> int:
    """The width of the shard axis on the ranks of a role. For the actor it is parallel.fsdp_size; for other roles the
    largest number up to it that divides their ranks of a node.
    """
    if role == ACTOR:
        return shard_size(config, launch)
    most = config.fsdp_size or launch.local_world_size
    return next(width for width in range(most, 0, -1) if launch.local_world_size % width == 0)


def parallel_of(config: ParallelConfig, role: str) -> ParallelConfig:
    """The section for the ranks of a role: only ranks that train share samples."""
    return config if role == ACTOR else replace(config, ulysses_sequence_parallel_size=1)


@contextmanager
def alone(ranks: int = 1) -> Iterator[None]:
    """Within the block, let collectives of this single process act as if there were this number of ranks, unless there
    is a process group already. It is for jobs that are only planned, not run.
    """
    if dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
