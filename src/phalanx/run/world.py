"""Join and leave the world: a rank's role, mesh, process groups and watch, and whether a job can run on its ranks."""

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from phalanx.config.messages import ConfigError
from phalanx.config.parallel import ParallelConfig
from phalanx.config.run import RunConfig
from phalanx.distributed.collectives import all_gather_object, broadcast_object, count_once
from phalanx.distributed.context_parallel import context_groups, context_mesh
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import (
    ACTOR,
    CHECKPOINT_S,
    ROLLOUT,
    SET_TIMEOUT,
    World,
    group_of,
    group_timeout,
    parallel_of,
    role_width,
    shard_size,
)
from phalanx.exit import take_role
from phalanx.garbage import collect_again
from phalanx.models.meeting import here
from phalanx.run import in_place, watchdog
from phalanx.run.devices import check_gpus, choose_interface, gpu_address, stay_near_gpu
from phalanx.run.heap import keep_freed_pages
from phalanx.run.link import Link
from phalanx.run.rendezvous import joining, meet
from phalanx.run.roles import Roles, roles_of
from phalanx.run.rules import Ranks, check_launch

log = logging.getLogger(__name__)
T = TypeVar("T")
STARTS = count()  # of worlds in this process, which all ranks start equally often


def ranks_of(cfg: RunConfig, roles: Roles, launch: Launch) -> Ranks:
    """The ranks for the rules of a configuration. Raises ConfigError if parallel.fsdp_size does not divide them."""
    actor = roles.launch(ACTOR, launch)
    return Ranks(
        width=shard_size(cfg.parallel, actor),
        node=actor.local_world_size,
        sampling_node=roles.launch(ROLLOUT, launch).local_world_size,
        apart=not roles.collocated,
        restarts=launch.max_restarts > 0 or bool(launch.nodes),
        in_place=in_place.generation is not None,
    )


def check_world(cfg: RunConfig, plan: Callable[[Roles, Launch], T], launch: Launch) -> T:
    """The result of `plan` for the roles of a launch. Raises ConfigError for a job that cannot run on this launch."""

    def checked(launch: Launch) -> T:
        roles = roles_of(vars(cfg).get("placement", {}), launch)
        check_launch(cfg, ranks_of(cfg, roles, launch))
        return plan(roles, launch)

    result = checked(launch)
    warn_of_sizes(launch, checked)
    return result


def warn_of_sizes(launch: Launch, works: Callable[[Launch], object]) -> None:
    """Warn of world sizes with which an elastic job cannot run: those for which `works(launch)` raises ConfigError."""
    for size in launch.worlds():
        if size == launch.world_size:
            continue
        # a warning and no error, because the present size works and the other one may never occur
        try:
            works(replace(launch, world_size=size))
        except ConfigError as error:
            then = in_place.without(size)
            log.warning("NNODES=%s: with %d ranks the job would %s: %s", launch.nodes, size, then, error)


@joining()
def start_world(config: ParallelConfig, placement: Mapping[str, Any] | None = None) -> World:
    """Join the world, with the role that `placement` gives this rank, and create its mesh. Every group gets the
    configured time limit.
    """
    collect_again()  # the libraries are loaded, but no weights yet
    later = in_place.met()
    whole = Launch.from_env()
    check_gpus()
    choose_interface(whole)
    roles = roles_of(placement or {}, whole)
    role = roles.of(whole.rank)
    config = parallel_of(config, role)
    launch = roles.launch(role, whole)
    width = role_width(config, launch, role)
    timeout = group_timeout(config.timeout_s)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", launch.local_rank) if cuda else torch.device("cpu")
    use_device(device)  # before any collective
    if cuda:
        stay_near_gpu(gpu_address(launch.local_rank))
    else:
        keep_freed_pages()
    # gloo handles CPU tensors (rewards, prompts, counts), which then need no copy to a GPU
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    store: dist.Store = dist.HashStore()
    start = f"start/{next(STARTS)}"  # the job's store keeps the addresses that ranks had in an earlier world
    slow = max(config.timeout_s, CHECKPOINT_S)  # ranks wait for the slowest file system to write a checkpoint
    with in_place.connecting() as most:
        limit = min(timeout, most)
        if not roles.collocated:
            take_role(role, first=launch.rank == 0, lead=role == ACTOR and launch.rank == 0)
        if not (roles.collocated and dist.is_initialized()):
            store = later or dist.PrefixStore(start, meet(whole, timeout))
            joined = dist.PrefixStore(f"role/{role}", store)
            dist.init_process_group(backend, None, limit, launch.world_size, launch.rank, joined)
        # Ranks are numbered node by node and the last axis varies fastest, so that a shard axis as wide as a node lies
        # within a node. FSDP2 uses both axes for HSDP: it gathers weights along `shard` and reduces gradients along
        # both.
        shape = (launch.world_size // width, width)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        context = context_mesh(config, launch.world_size, device)
        groups = [*mesh.get_all_groups(), *context_groups(context)]
        # A thread writes checkpoints while training continues. Collectives of two threads on one group may run in
        # different orders on different ranks, so that thread has a separate group.
        checkpoint_group = group_of(range(launch.world_size), min(slow, most.total_seconds()))
        link = None if roles.collocated else Link(roles, whole.rank, store, device, limit)
    count_once(config.ulysses_sequence_parallel_size)
    in_place.placed(role, launch.rank % width, width)
    watch = _start_watch(whole, min(config.heartbeat_timeout_s, config.timeout_s), store, link)
    _limit(timeout, dist.group.WORLD, *groups)  # subgroups do not inherit the default group's limit
    _limit(group_timeout(slow), checkpoint_group)
    return World(launch.rank, launch.world_size, device, mesh, checkpoint_group, watch, launch, link, context)


def _limit(timeout: timedelta, *groups: Any) -> None:
    """Set the time limit of collectives."""
    for group in groups:
        getattr(distributed_c10d, SET_TIMEOUT)(timeout, group)


def use_device(device: torch.device) -> None:
    """Make a GPU that of this thread: NCCL and FSDP2 use the current device, which is 0 in every thread at first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def world_of_run(world: World, config: ParallelConfig) -> World:
    """The world of one of the jobs that share it: with its own group to write checkpoints."""
    use_device(world.device)
    slow = max(config.timeout_s, CHECKPOINT_S)
    with in_place.connecting() as most:
        group = group_of(range(world.size), min(slow, most.total_seconds()))
    _limit(group_timeout(slow), group)
    return replace(world, checkpoint_group=group)


def _start_watch(launch: Launch, silence_s: float, store: dist.Store, link: Link | None) -> watchdog.Watch:
    """Start this rank's watch, with separate connections to the store that initialized the world."""
    host = socket.gethostname()
    marks = [] if link is None else [link.role]
    if launch.world_size != launch.local_world_size:  # clones of one image often share a host name
        marks.insert(0, f"node {launch.rank // launch.local_world_size}")
    if marks:
        host += f" ({', '.join(marks)})"
    if link is None:
        hosts = all_gather_object(host)
        # torchrun's store may outlive a restart of the ranks and still contain the errors of the earlier ones
        name = broadcast_object(uuid.uuid4().hex)
    else:  # no default group contains all ranks
        store.set(f"host/{launch.rank}", host)
        hosts = [host.decode() for host in store.multi_get([f"host/{rank}" for rank in range(launch.world_size)])]
        name = store.compare_set("watch", "", uuid.uuid4().hex).decode()
    stores: list[dist.Store] = []
    if launch.world_size > 1 and "MASTER_ADDR" in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=10)
        # A TCPStore client handles one call at a time, and torch's client is busy while a group connects. One of these
        # two is for heartbeats, which a dead host may block forever, and the other for the messages needed then.
        for _ in range(2):
            client = dist.TCPStore(address, port, wait_for_workers=False, timeout=patience)
            stores.append(dist.PrefixStore(f"watch/{name}", client))
    first = launch.rank - launch.local_rank
    local = range(first, first + launch.local_world_size)
    before, watch = watchdog.current, watchdog.Watch(launch.rank, hosts, local, silence_s, *stores)
    watchdog.current = watch  # for cli, which has no World when an exception ends the job
    # every rank's first heartbeat must be in the store before any rank reads them all
    if link is None:
        dist.barrier()
    else:
        link.meet()
    if stores:
        watch.start()
    in_place.watching(before)
    return watch


_left: list[dist.ProcessGroup] = []  # of the world that this process has left last
os.register_at_fork(before=_left.clear)  # a copy of this process has no threads of gloo, whose end it would wait for


def stop_world() -> None:
    """Leave the world, but not in one of several jobs. The watch is closed first, so that peers that leave do not count
    as failed. The process groups are kept until the next world is left, a fork, or the interpreter's end: a daemon
    thread of the job that freed them while it ends would abort the process.
    """
    if here() is not None:
        return
    if watchdog.current is not None:
        watchdog.current.close()
    if dist.is_initialized():
        _left[:] = distributed_c10d._world.pg_map
        dist.destroy_process_group()


def lone_world(config: ParallelConfig, ranks: int, rank: int, device: torch.device) -> World:
    """Within `alone`, one rank of a world of `ranks` ranks, with unsharded weights. rank: its data_rank."""
    shared = config.ulysses_sequence_parallel_size
    number = rank * shared
    mesh = init_device_mesh("cpu", (shared, 1), mesh_dim_names=("replicate", "shard"))
    watch = watchdog.Watch(number, ["no host"], range(1), silence_s=60)
    launch = Launch(number, ranks, 0, 1)  # no other rank is on its node
    context = context_mesh(config, shared, torch.device("cpu"))
    return World(number, ranks, device, mesh, mesh.get_group("replicate"), watch, launch, context=context)
