"""Recovery in place: ranks that survive the loss of others form the world anew, without leaving their processes.

With IN_PLACE=1 (train.sh) each node's launcher restarts only the ranks of its own node. A *generation* is the world
between two losses: a list of nodes, all of whose ranks take part. When a collective fails because a rank is gone, the
others drop their process groups and register in the job's store for the next generation, and so do the ranks that a
launcher has started again. Once every node of the last generation has registered or is known to be dead, the first rank
to see this writes the list of the next one. Its ranks build the job again, and take the state after the last complete
step from the memory of the survivors instead of from a checkpoint.

Keys in the store, below `in_place/`: `came/<node>/<local rank>`, starts of this rank; `current`, the generation that
trains; `ended`, the exit status of the job; `choice/<run>/<name>`, what rank 0 chose first (see phalanx.run.start); and
for each generation `<number>/<node>/<local rank>` of those that want to join it, `<number>/nodes` that were chosen,
`<number>/ports/<rank>`, on which a rank listens, and counts of ranks that have come so far or, as `<number>/left`, that
want to join after they took part in the generation before.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from phalanx.config.messages import ConfigError
from phalanx.distributed.fsdp import KEPT
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import World
from phalanx.exit import end, place, say
from phalanx.kept import keep
from phalanx.models.meeting import here
from phalanx.run import watchdog
from phalanx.run.in_memory import KeptJob, KeptState, Offers, frozen_of, leave, offers_of, parts_of, take
from phalanx.run.peer_copy import PeerCopy
from phalanx.run.rendezvous import connect_store
from phalanx.run.severed import listening_ports, sever, unlisted
from phalanx.training.progress import Progress

PATIENCE_S = 600.0
UNSEEN_S = 60.0  # for the ranks of a generation that was lost before they could watch each other
ARRIVAL_S = 10.0  # for the ranks that were chosen to read that
LOADING_S = 60.0  # for new ranks to import the libraries
CONNECTING_S = 20.0  # for ranks that have met to connect to each other
EAGER = 64  # ranks that connect to each other when a group is made
CONNECT_S = 60.0  # to the job's store, which node 0 may have taken along
LOOK_S = 0.05
REGROUP = 1000  # beside the numbers of signals that all ranks agree on: nodes wait to join


class Regroup(RuntimeError):
    """Raised on all ranks at once, after a complete step: nodes wait to join."""


@dataclass
class Generation:
    """This process's place: its node and local rank, of `nodes` nodes of equally many ranks."""

    node: int
    nodes: int
    launch: Launch
    store: dist.Store
    before: set[int]  # ports on which this process listened before it joined other ranks
    number: int = 0
    impossible: set[int] = field(default_factory=set)  # numbers of ranks on which the job cannot run

    def at(self, number: int) -> dist.Store:
        return dist.PrefixStore(f"{number}", self.store)

    @property
    def here(self) -> str:
        return f"{self.node}/{self.launch.local_rank}"

    def chosen(self, number: int) -> list[int]:
        """The nodes of a generation; the first one has all."""
        return list(range(self.nodes)) if number == 0 else json.loads(self.at(number).get("nodes"))

    def ready(self, number: int) -> list[int]:
        """The nodes all of whose ranks want to join a generation; those of a launcher's earlier start are gone."""
        at, complete = self.at(number), []
        for node in range(self.nodes):
            keys = [f"{node}/{local}" for local in range(self.launch.local_world_size)]
            if at.check(keys) and len(set(at.multi_get(keys))) == 1:
                complete.append(node)
        return complete

    def register(self, dead: Callable[[], set[int]] | None) -> None:
        """Take part in the next generation that this node can join, and wait for its other ranks. dead: the nodes
        without a sign of life, which only survivors know.
        """
        number = self._current() + 1
        while True:
            if self._join(number, dead):
                self.store.set("current", str(number))
                self._take(number)
                if self.arrive("chosen", ARRIVAL_S):
                    return
            elif dead is not None:
                end(1)  # the others did not wait for this node, which can join again
            number += 1

    def _join(self, number: int, dead: Callable[[], set[int]] | None) -> bool:
        """Register for a generation, and wait until its nodes are chosen. Returns whether this one is among them."""
        at, begin = self.at(number), time.monotonic()
        # all ranks that a launcher starts together have the same parent
        at.set(self.here, f"{os.getppid()} {os.environ['TORCHELASTIC_RESTART_COUNT']}")
        at.add("left" if self.node in self.chosen(number - 1) else "came", 1)
        # one rank of each node looks at all others, the less often the more there are
        looks, pause_s = self.launch.local_rank == 0, LOOK_S * max(1, self.nodes / 8)
        while not at.check(["nodes"]):
            if self.store.check(["ended"]):  # without this rank
                end(int(self.store.get("ended")), restart=False)
            waited = time.monotonic() - begin
            gone = set() if dead is None else dead()
            if looks or self.node in gone:
                self._choose(number, gone, survives=dead is not None, waited=waited)
            time.sleep(pause_s)
        return self.node in self.chosen(number)

    def _choose(self, number: int, gone: set[int], *, survives: bool, waited: float) -> None:
        """Choose the nodes of a generation, if each of the last one is ready or gone."""
        last, ready = self.chosen(number - 1), self.ready(number)
        if survives and waited > UNSEEN_S:
            gone |= {node for node in last if node not in watched}
        if self.node in gone and self.node not in ready:
            end(1)  # this node has lost a rank, so its launcher has to start all of them again
        works = len(ready) * self.launch.local_world_size not in self.impossible
        if works and self.node in ready and all(node in ready or node in gone for node in last):
            self.at(number).compare_set("nodes", "", json.dumps(ready))
        elif waited > PATIENCE_S:
            absent = [node for node in last if node not in ready]
            raise ConfigError(f"{place()} waited {PATIENCE_S:.0f} s for nodes {absent} to come back")

    def _current(self) -> int:
        return int(self.store.get("current")) if self.store.check(["current"]) else 0

    def _take(self, number: int) -> None:
        """Become a rank of this generation; ranks are numbered in the order of nodes."""
        nodes, local = self.chosen(number), self.launch.local_world_size
        first, self.number = nodes.index(self.node) * local, number
        os.environ |= {"RANK": str(first + self.launch.local_rank), "WORLD_SIZE": str(len(nodes) * local)}
        os.environ |= {"GROUP_RANK": str(nodes.index(self.node)), "GROUP_WORLD_SIZE": str(len(nodes))}

    def arrive(self, where: str, limit_s: float) -> bool:
        """Wait until all ranks of this generation have come so far; False if one is lost on its way."""
        at, after, size = self.at(self.number), self.at(self.number + 1), Launch.from_env().world_size
        at.add(where, 1)
        begin = time.monotonic()
        while at.add(where, 0) < size:
            if time.monotonic() - begin > limit_s or after.add("left", 0):
                return False
            time.sleep(LOOK_S)
        return True

    def publish(self) -> None:
        """Tell the others on which ports this rank listens to them."""
        self.at(self.number).set(f"ports/{os.environ['RANK']}", json.dumps(sorted(listening_ports() - self.before)))

    def sever(self) -> None:
        """Close the connections to the other ranks of this generation."""
        at, ports = self.at(self.number), set[int]()
        for rank in range(Launch.from_env().world_size):
            if at.check([f"ports/{rank}"]):
                ports |= set(json.loads(at.get(f"ports/{rank}")))
        sever(ports)

    def waiting(self) -> bool:
        """Whether a whole node waits to join."""
        return self.at(self.number + 1).add("came", 0) > 0 and bool(self.ready(self.number + 1))


generation: Generation | None = None  # None: a lost rank ends the job
lost_groups: list[Any] = []  # see drop_groups
place_of_shards: tuple[str, int, int] | None = None  # see `placed`
watched: list[int] = []  # the nodes of the generation to which the watch belongs
jobs: dict[str, KeptJob] = {}  # that train now, by the name of a sweep's run
offers: dict[str, Offers] = {}  # what those of the last generation could offer
peer = PeerCopy()  # what this rank keeps for another one


def enter() -> None:
    """Take a place in the first generation or, as a rank that was started again, in the next one."""
    global generation
    if os.environ.get("IN_PLACE") != "1" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launch = Launch.from_env()
    nodes = launch.world_size // launch.local_world_size
    store = dist.PrefixStore("in_place", connect_store(launch, timedelta(seconds=CONNECT_S)))
    keep()
    generation = Generation(int(os.environ["GROUP_RANK"]), nodes, launch, store, listening_ports())
    if store.add(f"came/{generation.here}", 1) > 1:
        generation.register(None)


def survives(error: BaseException, lost: bool) -> bool:
    """Whether this rank goes on after an exception of its job, as a rank of the next generation. lost: the error may be
    that of a collective whose peer is gone. Raises ConfigError if node 0 has left, which keeps the store.
    """
    try:
        return _goes_on(error, lost)
    except dist.DistError as failed:
        raise ConfigError(
            "node 0 has left the job, with the store in which ranks meet; start it again, and it resumes from the last "
            "checkpoint"
        ) from failed


def _goes_on(error: BaseException, lost: bool) -> bool:
    watch = watchdog.current
    if generation is None or not (lost or isinstance(error, Regroup | dist.DistError)):
        return False
    if watch is not None and watch.first_error() is not None:  # a rank raised: all would raise again
        return False
    began = time.monotonic()
    if watch is not None:
        watch.patient = True
    for name, job in jobs.items():
        offers[name], KEPT[:] = offers_of(job), frozen_of(job)  # the runs of a sweep share what is frozen
        if job.copies:
            width = job.world.shard_size
            offers[name] |= {(*of, width): (None, [memory], []) for of, memory in peer.copies.items()}
    generation.sever()  # others may still wait for this rank
    for job in jobs.values():
        leave(job)
    jobs.clear()
    local = generation.launch.local_world_size

    def dead() -> set[int]:
        return set() if watch is None else {watched[rank // local] for rank in watch.silent()}

    lost_groups.extend(unlisted)
    unlisted.clear()
    if dist.is_initialized():
        lost_groups.extend(distributed_c10d._world.pg_map)
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    distributed_c10d._world.group_count = 0  # by which groups are named; one that could not connect has counted
    generation.register(dead)
    if Launch.from_env().rank == 0:
        names = ", ".join(map(str, generation.chosen(generation.number)))
        steps = sorted({max(each)[0] for each in offers.values() if each})
        last = f"; the last step is {', '.join(map(str, steps))}" if steps else ""
        say(f"going on in place after {time.monotonic() - began:.1f} s, with nodes {names}{last}")
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
    global watched
    if generation is not None and watchdog.current is not None:
        watched = generation.chosen(generation.number)
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


def copy_state() -> None:
    """Exchange the state with other nodes after a complete step, if the job does so; all ranks call this together."""
    job = jobs.get(_run())
    if job is not None and job.copies:
        with job.timers("peer_copy"):
            peer.update(parts_of(job.states.values()), job.progress.step, job.world)


def taken(states: Mapping[str, KeptState], world: World) -> tuple[Progress, list[Tensor]] | None:
    """Take the state that survivors have, in place; its counters and samples in flight, None in the first generation
    and if there is none. All ranks call this together.
    """
    if generation is None or not generation.number:
        return None
    state = take(offers.get(_run(), {}), states, world)
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
    """The store in which the ranks of a later generation meet, once all are there; None in the first one."""
    if generation is None or not generation.number:
        return None
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
