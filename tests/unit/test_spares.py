"""Who takes the place of a lost node, and which nodes that wait are alive."""

import threading
import time

import pytest
import torch.distributed as dist

from phalanx.run import spares
from phalanx.run.spares import Signs, role_of, successors
from tests.helpers.checks import wait_for


@pytest.mark.parametrize(
    ("last", "ready", "gone", "waiting", "nodes"),
    [
        ([0, 1, 2], [0, 2], set(), [3], []),  # node 1 may still come
        ([0, 1, 2], [0, 2], {1}, [], [0, 2]),
        ([0, 1, 2], [0, 2, 3], {1}, [3], [0, 3, 2]),
        ([0, 1, 2], [0, 1, 2, 3], {1}, [3], [0, 1, 2]),  # it was started again in time
        ([0, 1, 2], [2, 3, 4], {0, 1}, [4, 3], [4, 3, 2]),
        ([0, 1, 2], [2, 3], {0, 1}, [3], [3, 2]),
        ([0, 3, 2], [0, 1, 2], {3}, [1], [0, 1, 2]),  # a node that came back stands in for the spare
        ([0, 2], [0, 1, 2], set(), [1], [0, 2, 1]),
        ([0, 2], [0, 1, 2, 3], set(), [1, 3], [0, 2, 1]),  # no more than the job has
    ],
)
def test_a_node_that_waits_takes_the_place_of_a_lost_one(
    last: list[int], ready: list[int], gone: set[int], waiting: list[int], nodes: list[int]
) -> None:
    assert successors(last, ready, gone, waiting, 3) == nodes


def test_the_words_for_a_new_node() -> None:
    assert role_of(3, [0, 1, 2], [0, 3, 2]) == "node 3 takes the place of node 1"
    assert role_of(3, [0, 1, 2], [3, 2]) == "node 3 takes the place of node 0"
    assert role_of(4, [0, 1, 2], [3, 4, 2]) == "node 4 takes the place of node 1"
    assert role_of(1, [0, 2], [0, 2, 1]) == "node 1 joins"


def test_a_spare_that_dies_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that left its name in the store long ago does not count, and one that waits does until it is silent."""
    monkeypatch.setattr(spares, "BEAT_S", 0.02)
    monkeypatch.setattr(spares, "SILENT_S", 0.5)
    said: list[str] = []
    monkeypatch.setattr(spares, "say", said.append)
    store, dies = dist.HashStore(), threading.Event()
    signs = Signs(store)
    store.add("beat/2", 7)

    def wait() -> None:
        with Signs(store).waits(3):
            dies.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for(lambda: signs.tell([2, 3]) == [3])
    assert store.add("waits", 0) == 1
    dies.set()
    thread.join()
    wait_for(lambda: signs.tell([2, 3]) == [])
    time.sleep(0.1)
    assert signs.tell([2, 3]) == [] and store.add("waits", 0) == 0
    assert said == [
        "node 3 is ready, and waits for a place in the job",
        "node 3 waits for a place",
        "node 3, which waited for a place, is gone: no sign of life for 0 s",
    ]
