"""Recovery in place: ranks that survive the loss of others form the world anew, without leaving their processes.

With IN_PLACE=1 (train.sh) each node's launcher restarts only the ranks of its own node. A *generation* is the world
between two losses: a list of nodes, all of whose ranks take part. When a collective fails because a rank is gone, the
others drop their process groups and register in the job's store for the next generation, and so do the ranks that a
launcher has started again. Once every node of the last generation has registered or is known to be dead, the first rank
to see this writes the list of the next one. Its ranks build the job again, and take the state after the last complete
step from the memory of the survivors instead of from a checkpoint. Nodes without a place load the libraries and wait
for one (see phalanx.run.spares).
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from phalanx.config.messages import ConfigError
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.fsdp import KEPT
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import World
from phalanx.exit import say
from phalanx.kept import keep
from phalanx.models.meeting import here
from phalanx.run import watchdog
from phalanx.run.generations import Generation, Regroup
from phalanx.run.in_memory import KeptJob, Offers, job_parts, leave, offers_of, take
from phalanx.run.peer_copy import PeerCopy
from phalanx.run.rendezvous import connect_store
from phalanx.run.severed import listening_ports, unlisted
from phalanx.run.spares import role_of
from phalanx.training.optim import TrainState
from phalanx.training.progress import Progress

LOADING_S = 60.0  # for new ranks to import the libraries
CONNECTING_S = 20.0  # for ranks that have met to connect to each other
EAGER = 64  # ranks that connect to each other when a group is made
CONNECT_S = 60.0  # to the job's store, which node 0 may have taken along
# NCCL aborts the groups of a lost rank, or one that waits too long, and not the process; at once, and without a sign in
# the store, by which processes that start later would end themselves
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
REGROUP = 1000  # beside the numbers of signals that all ranks agree on: nodes wait to join


generation: Generation | None = None  # None: a lost rank ends the job
lost_groups: list[Any] = []  # see drop_groups
place_of_shards: tuple[str, int, int] | None = None  # see `placed`
jobs: dict[str, KeptJob] = {}  # that train now, by the name of a sweep's run
offers: dict[str, Offers] = {}  # what those of the last generation could offer
peer = PeerCopy()  # what this rank keeps for another one


@contextlib.contextmanager
def keeping_store() -> Iterator[None]:
    """Within the block, raise ConfigError if the store is lost, which node 0 keeps unless STORE_ADDR says otherwise."""
    try:
        yield
    except dist.DistError as failed:
        kept = os.environ.get("STORE_ADDR")
        lost = f"STORE_ADDR={kept}: the store is gone" if kept else "node 0 has left the job, with the store"
        again = "in which ranks meet; start it again, and it resumes from the last checkpoint"
        raise ConfigError(f"{lost} {again}") from failed


@keeping_store()
def enter() -> None:
    """Take a place in the first generation or, as a rank that was started again, in the next one. A rank whose node has
    no place first builds its job as far as it needs no other rank, so that the libraries are loaded.
    """
    global generation
    if os.environ.get("IN_PLACE") != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launch, spares = Launch.from_env(), int(os.environ.get("SPARES") or 0)
    nodes, local = launch.world_size // launch.local_world_size, launch.local_world_size
    store = dist.PrefixStore("in_place", connect_store(launch, timedelta(seconds=CONNECT_S)))
    keep()
    for name, value in NCCL.items():
        os.environ.setdefault(name, value)
    generation = Generation(int(os.environ["GROUP_RANK"]), nodes, launch, store, listening_ports(), spares)
    shape = f"NNODES={nodes}, SPARES={spares} and NPROC_PER_NODE={local}"
    first, _, by = store.compare_set("shape", "", f"{shape} on {socket.gethostname()}").decode().partition(" on ")
    if first != shape:
        raise ConfigError(f"{shape} on {socket.gethostname()}, and {first} on {by}; expected the same on all nodes")
    if generation.node in generation.chosen(generation.current()):
        generation.register(None)


@keeping_store()
def survives(error: BaseException, lost: bool) -> bool:
    """Whether this rank goes on after an exception of its job, as a rank of the next generation. lost: the error may be
    that of a collective whose peer is gone. Raises ConfigError if node 0 has left, which keeps the store.
    """
    watch = watchdog.current
    if generation is None or not (lost or isinstance(error, Regroup | dist.DistError)):
        return False
    if watch is not None and watch.first_error() is not None:  # a rank raised: all would raise again
        return False
    if generation.number < 0:
        generation.register(None)
        if generation.launch.local_rank == 0:
            last = generation.chosen(generation.number - 1)
            say(role_of(generation.node, last, generation.chosen(generation.number)))
        return True
    began = time.monotonic()
    if watch is not None:
        watch.patient = True
    for name, job in jobs.items():
        offers[name] = offers_of(job)
        KEPT[:] = [state.model.sharded.frozen for state in job.states.values()]  # the runs of a sweep share it
        if job.copies:
            width = job.world.shard_size
            offers[name] |= {(*of, width): (None, [memory], []) for of, memory in peer.copies.items()}
    generation.sever()  # others may still wait for this rank
    for job in jobs.values():
        leave(job)
    jobs.clear()
    local = generation.launch.local_world_size

    def dead() -> set[int]:
        return set() if watch is None else {generation.watched[rank // local] for rank in watch.silent()}

    lost_groups.extend(unlisted)
    unlisted.clear()
    if dist.is_initialized():
        lost_groups.extend(distributed_c10d._world.pg_map)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    distributed_c10d._world.group_count = 0  # by which groups are named; one that could not connect has counted
    trained = generation.number
    generation.register(dead)
    if watch is not None:
        watch.sever = None  # what fails from now on is no consequence of this loss
    last, nodes = generation.chosen(generation.number - 1), generation.chosen(generation.number)
    if generation.launch.local_rank == 0 and generation.survivors(trained)[:1] == [generation.node]:
        names, steps = ", ".join(map(str, nodes)), sorted({max(each)[0] for each in offers.values() if each})
        newest = f"; the last step is {', '.join(map(str, steps))}" if steps else ""
        say(f"going on in place after {time.monotonic() - began:.1f} s, with nodes {names}{newest}")
        for node in nodes:
            if node not in last:
                say(role_of(node, last, nodes))
    return True


def drop_groups() -> None:
    """Destroy the process groups of the world that was lost, once nothing else refers to them. It is done by a thread,
    since gloo waits there for the connections to a rank that is gone, if they were never made.
    """
    groups = list(lost_groups)
    lost_groups.clear()
    threading.Thread(target=groups.clear, name="lost groups", daemon=True).start()


@contextlib.contextmanager
def connecting() -> Iterator[timedelta]:
    """A block in which ranks make their groups, with limits no longer than the one that it gets.

    gloo can make connections at their first use, so that 1,024 ranks need not 2,000 sockets each. But nothing can wake
    up a rank that waits for its first connection to a lost one, and a late one may reach another process that has the
    port by then. So a few ranks, and those that are to survive a loss, make all of them in this block, in which a lost
    rank costs survivors at most CONNECTING_S.
    """
    if generation is None:
        if sys.platform.startswith("linux") and Launch.from_env().world_size > EAGER:  # macOS cannot do so
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        yield timedelta.max
        return
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    usual, most = distributed_c10d.default_pg_timeout, timedelta.max
    if generation.number:
        distributed_c10d.default_pg_timeout = most = timedelta(seconds=CONNECTING_S)  # of a mesh's groups
    try:
        yield most
    except RuntimeError as error:
        raise dist.DistError(f"a rank was lost while others connected to it: {error}") from error
    finally:
        distributed_c10d.default_pg_timeout = usual
    generation.publish()  # for a loss before the job begins


def watching(before: watchdog.Watch | None) -> None:
    """All ranks of this generation are watched from now on, instead of those of the one `before`."""
    if generation is not None and watchdog.current is not None:
        generation.watched = generation.chosen(generation.number)
        watchdog.current.sever = generation.sever
        if before is not None:
            watchdog.current.stop = before.stop  # a signal that came meanwhile
            before.retire()


def placed(role: str, shard: int, width: int) -> None:
    """This rank has a role and, of `width` shards, this one. Frozen weights that it kept of another one are dropped."""
    global place_of_shards
    if place_of_shards != (role, shard, width):
        KEPT.clear()
    place_of_shards = role, shard, width


def _run() -> str:
    seat = here()
    return "" if seat is None else seat.name


def begin(each: KeptJob | None) -> None:
    """A job begins, whose state is to survive the loss of other ranks; None: one without a state."""
    if generation is not None:
        offers.pop(_run(), None)
        if each is not None:
            jobs[_run()] = each
        generation.publish()
        copy_state()


def confirm(world: World) -> None:
    """On GPUs raise an error if a group was aborted in this step, since NCCL's collectives of it raise none and leave
    arbitrary results. All ranks call this together.
    """
    if world.device.type != "cuda":
        return
    one, meshes = torch.ones(1, device=world.device), (world.mesh, world.context)
    for group in (None, *(group for mesh in meshes if mesh is not None for group in mesh.get_all_groups())):
        dist.all_reduce(one, group=group)
    one.item()
    reduce_int(0, "max")  # one that ended meanwhile


def copy_state() -> None:
    """Exchange the state with other nodes after a complete step, if the job does so; all ranks call this together."""
    job = jobs.get(_run())
    if job is not None and job.copies:
        with job.timers("peer_copy"):
            peer.update(job_parts(job), job.progress.step, job.world)


def taken(states: Mapping[str, TrainState], sampling: Any, world: World) -> tuple[Progress, list[Tensor]] | None:
    """Take the state that survivors have, in place; its counters and samples in flight, None in the first generation
    and if there is none. All ranks call this together.
    """
    if generation is None or not generation.number:
        return None
    state = take(offers.get(_run(), {}), states, sampling, world)
    peer.keep(None if state is None else state[0].step)
    if state is None and world.rank == 0:
        say("no rank has the state after the last step: the job starts from its last checkpoint")
    return state


def ended(status: int) -> None:
    """The job has ended, also for ranks that wait to join."""
    if generation is not None:
        with contextlib.suppress(dist.DistError):  # node 0 has left
            generation.store.set("ended", str(status))


def met() -> dist.Store | None:
    """The store in which the ranks of a later generation meet, once all are there; None in the first one. Raises
    Regroup if this rank has to wait for a place first.
    """
    if generation is None or not generation.number:
        return None
    if generation.number < 0:
        raise Regroup("this rank has no place yet")
    if not generation.arrive("joins", LOADING_S):
        raise RuntimeError("a peer was lost while ranks met again")
    return dist.PrefixStore("meet", generation.at(generation.number))


def waiting(world: World) -> bool:
    """Whether a node waits to join; asked on rank 0 of those that train."""
    return generation is not None and world.rank == 0 and generation.waiting()


def without(size: int) -> str:
    """Note that the job cannot run on this number of ranks; returns what it then does, for a message."""
    if generation is None:
        return "end"
    generation.impossible.add(size)
    return "wait"


def remembered(name: str, choose: Callable[[], str]) -> str:
    """The choice `name` of rank 0 at the start of the job; on rank 0."""
    if generation is None:
        return choose()
    key = f"choice/{_run()}/{name}"
    if not generation.store.check([key]):
        generation.store.set(key, choose())
    return generation.store.get(key).decode()
