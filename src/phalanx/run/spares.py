"""Nodes that wait for a place in a job that goes on in place (see phalanx.run.in_place): signs of their life, and who
takes whose place.

A node waits if its NODE_RANK is not below NNODES, or if it comes back after another one has taken its place.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from phalanx.exit import say

BEAT_S = 0.5
PROOF_S = 3.0  # within which one that lives shows it
SILENT_S = 5.0  # without a beat
WAIT_S = 0.25  # between looks of ranks that wait


def successors(last: Sequence[int], ready: Sequence[int], gone: set[int], spare: Sequence[int], most: int) -> list[int]:
    """The nodes of the next generation, in the order of their ranks; none while one of the `last` is neither `ready`
    nor `gone`.

    A node of the last generation that is ready keeps its place, started again or not. Otherwise the first one of those
    that wait, `spare`, takes it, so that the ranks of others keep their numbers. Places beyond those of the last
    generation, `most` in all, are filled as well.
    """
    if not all(node in ready or node in gone for node in last):
        return []
    free = list(spare)
    nodes = []
    for node in last:
        if node in ready:
            nodes.append(node)
        elif free:
            nodes.append(free.pop(0))
    return nodes + free[: most - len(nodes)]


def role_of(node: int, last: Sequence[int], nodes: Sequence[int]) -> str:
    """The place of a new node, in words: that of a lost one, or one more. nodes: as `successors` returns."""
    place = [other for other in nodes if other not in last].index(node)
    lost = [other for other in last if other not in nodes]
    return f"node {node} takes the place of node {lost[place]}" if place < len(lost) else f"node {node} joins"


class Signs:
    """Signs of life of nodes that wait, in the job's store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._seen: dict[int, tuple[int, float]] = {}  # each node's last beat, and when it came
        self._told: set[int] = set()
        self._announced = False  # this node

    @contextlib.contextmanager
    def waits(self, node: int) -> Iterator[None]:
        """A block in which this node waits for a place, and shows that it lives."""
        over = threading.Event()

        def beat() -> None:
            with contextlib.suppress(dist.DistError):  # the waiting thread says so
                while not over.wait(BEAT_S):
                    self._store.add(f"beat/{node}", 1)

        self._store.add("waits", 1)
        threading.Thread(target=beat, name="waiting", daemon=True).start()
        if not self._announced:
            say(f"node {node} is ready, and waits for a place in the job")
        self._announced = True
        try:
            yield
        finally:
            over.set()
            with contextlib.suppress(dist.DistError):
                self._store.add("waits", -1)

    def alive(self, nodes: Sequence[int]) -> list[int]:
        """Those of the nodes that have shown that they live since they were first asked for, and lately."""
        now, living = time.monotonic(), []
        for node in nodes:
            beat = self._store.add(f"beat/{node}", 0)
            if node not in self._seen:
                self._seen[node] = beat, float("-inf")  # it may have been dead for long
            elif beat != self._seen[node][0]:
                self._seen[node] = beat, now
            if now - self._seen[node][1] < SILENT_S:
                living.append(node)
        return living

    def tell(self, nodes: Sequence[int]) -> list[int]:
        """Say which nodes have begun or ceased to wait since the last call; returns those that wait."""
        if any(node not in self._seen for node in nodes):
            self.alive(nodes)
            time.sleep(2 * BEAT_S)  # so that a new one is known at once
        living = self.alive(nodes)
        for node in sorted(self._told.symmetric_difference(living)):
            if node in living:
                say(f"node {node} waits for a place")
            elif node in nodes:
                say(f"node {node}, which waited for a place, is gone: no sign of life for {SILENT_S:.0f} s")
        self._told = set(living)
        return living
