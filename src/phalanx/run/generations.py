"""Generations of ranks that go on in place (see phalanx.run.in_place): which nodes take part in the next one.

Keys in the store, below `in_place/`: `shape`, the numbers of nodes and ranks; `current`, the generation that trains;
`ended`, the exit status of the job; `choice/<run>/<name>`, what rank 0 chose first (see phalanx.run.start); `waits`,
the number of nodes that wait for a place, and `beat/<node>`, their signs of life; and for each generation
`<number>/<node>/<local rank>` of those that want to join it, `<number>/nodes` that were chosen, in the order of their
ranks, `<number>/ports/<rank>`, on which a rank listens, and counts of ranks that have come so far or, as
`<number>/left`, that want to join after they took part in the generation before.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from phalanx.config.messages import ConfigError
from phalanx.distributed.launch_env import Launch
from phalanx.exit import end, place, say
from phalanx.run.rendezvous import SAY_S
from phalanx.run.rendezvous import waiting as waiting_words
from phalanx.run.severed import listening_ports, sever
from phalanx.run.spares import PROOF_S, WAIT_S, Signs, successors

PATIENCE_S = 600.0
UNSEEN_S = 60.0  # for the ranks of a generation that was lost before they could watch each other
ARRIVAL_S = 10.0  # for the ranks that were chosen to read that
LOOK_S = 0.05


class Regroup(RuntimeError):
    """Raised on all ranks at once, after a complete step: nodes wait to join. Raised by a rank without a place when it
    would meet the others.
    """


@dataclass
class Generation:
    """This process's node and local rank, in a job of `nodes` nodes of equally many ranks and some spare ones."""

    node: int
    nodes: int
    launch: Launch
    store: dist.Store
    before: set[int]  # ports on which this process listened before it joined other ranks
    spares: int = 0
    number: int = -1  # before this process has a place
    impossible: set[int] = field(default_factory=set)  # numbers of ranks on which the job cannot run
    watched: list[int] = field(default_factory=list)  # the nodes of the generation to which the watch belongs

    def __post_init__(self) -> None:
        self.signs = Signs(self.store)

    def at(self, number: int) -> dist.Store:
        return dist.PrefixStore(f"{number}", self.store)

    @property
    def here(self) -> str:
        return f"{self.node}/{self.launch.local_rank}"

    def chosen(self, number: int) -> list[int]:
        """The nodes of a generation in the order of their ranks; those that the first one needs, before it."""
        return list(range(self.nodes)) if number < 0 else json.loads(self.at(number).get("nodes"))

    def ready(self, number: int) -> list[int]:
        """The nodes all of whose ranks want to join a generation; those of a launcher's earlier start are gone."""
        at, complete = self.at(number), []
        for node in range(self.nodes + self.spares):
            keys = [f"{node}/{local}" for local in range(self.launch.local_world_size)]
            if at.check(keys) and len(set(at.multi_get(keys))) == 1:
                complete.append(node)
        return complete

    def survivors(self, before: int) -> list[int]:
        """The nodes of this generation whose ranks are those of the one `before`, not started again."""
        last, then, now = self.chosen(before), self.at(before), self.at(self.number)
        nodes = [node for node in self.chosen(self.number) if node in last]
        return [node for node in nodes if then.get(f"{node}/0") == now.get(f"{node}/0")]

    def current(self) -> int:
        """The generation that trains; -1 before the first one."""
        return int(self.store.get("current")) if self.store.check(["current"]) else -1

    def register(self, dead: Callable[[], set[int]] | None) -> None:
        """Take part in the next generation that this node can join, and wait for its other ranks. dead: the nodes
        without a sign of life, which only survivors know.
        """
        number = self.current() + 1
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
        at, begin, last = self.at(number), time.monotonic(), self.chosen(number - 1)
        if at.check(["nodes"]):
            return False
        # all ranks that a launcher starts together have the same parent
        start = f"{socket.gethostname()} {os.getppid()} {os.environ['TORCHELASTIC_RESTART_COUNT']}"
        at.set(self.here, start)
        placed, leads = self.node in last, self.launch.local_rank == 0
        at.add("left" if placed else "came", 1)
        # one rank of each node looks at all others, the less often the more there are
        pause_s, signs, told_s = LOOK_S * max(1, self.nodes / 8) if placed else WAIT_S, Signs(self.store), SAY_S
        with contextlib.nullcontext() if placed or not leads else self.signs.waits(self.node):
            while not at.check(["nodes"]) and not self.store.check(["ended"]):
                waited = time.monotonic() - begin
                gone = set() if dead is None else dead()
                if placed and (leads or self.node in gone):
                    self._choose(number, gone, signs, survives=dead is not None, waited=waited)
                if number == 0 and self.here == "0/0" and waited > told_s:
                    say(self._missing(waited))
                    told_s *= 2
                time.sleep(pause_s)
        if not at.check(["nodes"]):  # the job has ended without this rank
            end(int(self.store.get("ended")), restart=False)
        if (other := at.get(self.here).decode()) != start:
            raise ConfigError(
                f"node {self.node} came twice, from {other.split()[0]} and from {start.split()[0]}; expected one "
                "NODE_RANK each"
            )
        return self.node in self.chosen(number)

    def _choose(self, number: int, gone: set[int], signs: Signs, *, survives: bool, waited: float) -> None:
        """Choose the nodes of a generation, if each of the last one is ready or gone."""
        last, ready = self.chosen(number - 1), self.ready(number)
        if survives and waited > UNSEEN_S:
            gone |= {node for node in last if node not in self.watched}
        if self.node in gone and self.node not in ready:
            end(1)  # this node has lost a rank, so its launcher has to start all of them again
        free = [node for node in ready if node not in last]
        spare = signs.alive(free)
        nodes = successors(last, ready, gone, spare, self.nodes)
        works = len(nodes) * self.launch.local_world_size not in self.impossible
        unsure = len(nodes) < self.nodes and len(spare) < len(free) and waited < PROOF_S
        if works and self.node in nodes and not unsure:
            self.at(number).compare_set("nodes", "", json.dumps(nodes))
        elif waited > PATIENCE_S:
            absent = [node for node in last if node not in ready]
            if number == 0:
                raise ConfigError(self._missing(waited))
            raise ConfigError(f"{place()} waited {PATIENCE_S:.0f} s for nodes {absent} to come back")

    def _missing(self, waited: float) -> str:
        ready = self.ready(0)
        return waiting_words("node", self.nodes, [node for node in range(self.nodes) if node not in ready], waited)

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
        """Whether a whole node waits to join, and there is a place for it; tells of nodes that wait for one."""
        next_one, nodes = self.at(self.number + 1), self.chosen(self.number)
        came = next_one.add("came", 0) and [node for node in self.ready(self.number + 1) if node not in nodes]
        return bool(self.signs.tell(came or []) and len(nodes) < self.nodes)
