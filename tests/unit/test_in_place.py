"""Who takes part in the next generation of ranks, and what of a job's state survives."""

import os
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.distributed.launch_env import Launch
from phalanx.exit import join_nodes
from phalanx.run import generations, in_place
from phalanx.run.generations import Generation
from phalanx.run.in_memory import agreed_offer, offers_of
from phalanx.run.severed import listening_ports, sever
from phalanx.training.progress import Progress


def place(store: dist.Store, node: int, local: int = 0, *, nodes: int = 3, ranks: int = 1) -> Generation:
    return Generation(node, nodes, Launch(node * ranks + local, nodes * ranks, local, ranks), store, set(), spares=1)


def numbers(places: list[tuple[Generation, set[int] | None]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """RANK/WORLD_SIZE of these ranks, each with the nodes that it knows to be dead, after they have joined together.

    A process has one environment, so those of the ranks, which are threads here, are read as they are written.
    """
    lock, found = threading.Lock(), {}
    take = Generation._take

    def record(self: Generation, number: int) -> None:
        with lock:
            take(self, number)
            found[self.here] = f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']}"

    monkeypatch.setattr(Generation, "_take", record)
    monkeypatch.setattr(Generation, "arrive", lambda *_: True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    threads = []
    for each, gone in places:
        dead = None if gone is None else lambda gone=gone: gone
        threads.append(threading.Thread(target=each.register, args=(dead,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), found
    return [found[each.here] for each, _ in places]


@pytest.fixture
def store() -> dist.Store:
    made = dist.HashStore()
    made.set_timeout(timedelta(seconds=20))
    made.set("current", "0")  # a generation of all three nodes
    made.set("0/nodes", "[0, 1, 2]")
    return made


def test_survivors_go_on_without_a_dead_node(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(place(store, node), {1}) for node in (0, 2)]
    assert numbers(places, monkeypatch) == ["0/2", "1/2"]
    assert places[0][0].chosen(1) == [0, 2] and store.get("current") == b"1"


def test_a_node_that_was_started_again_takes_its_old_place(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody needs to know that it is dead: its ranks want to join."""
    places = [(place(store, 0), set()), (place(store, 1), None), (place(store, 2), set())]
    assert numbers(places, monkeypatch) == ["0/3", "1/3", "2/3"]


def test_a_later_node_joins_the_survivors(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbers([(place(store, 0), {1, 2})], monkeypatch) == ["0/1"]
    late = place(store, 2)
    assert not place(store, 0).ready(2)
    first = place(store, 0)
    first.number = 1
    store.set("2/2/0", "1 0")
    monkeypatch.setattr(late, "current", lambda: 1)  # it came before, however late its thread starts
    assert numbers([(first, set()), (late, None)], monkeypatch) == ["0/2", "1/2"]


def test_a_node_is_ready_only_with_ranks_of_one_start(store: dist.Store) -> None:
    """A rank that registered before its launcher killed it does not count for the ranks that came later."""
    each = place(store, 0, ranks=2)
    store.set("1/1/0", "77 0")
    assert each.ready(1) == []
    store.set("1/1/1", "77 1")
    assert each.ready(1) == []
    store.set("1/1/0", "77 1")
    assert each.ready(1) == [1]


def test_a_job_waits_where_it_cannot_run_on_the_survivors(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "PATIENCE_S", 0.2)
    each = place(store, 0)
    each.impossible.add(1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(ValueError, match=r"waited 0 s for nodes \[1, 2\] to come back"):
        each.register(lambda: {1, 2})


Keys = dict[tuple[int, int], bool]


def own(*keys: tuple[int, int]) -> Keys:
    """By step and shard: a rank's own parts."""
    return dict.fromkeys(keys, True)


def copies(*keys: tuple[int, int]) -> Keys:
    """What it keeps for another rank."""
    return dict.fromkeys(keys, False)


@pytest.mark.parametrize(
    ("offered", "width", "agreed"),
    [
        ([own((3, 0)), own((3, 0))], 1, (3, [0], 0)),
        ([own((2, 0)), own((3, 0))], 1, (3, [1], 1)),
        # one rank of the first replica has finished step 4, the other one has not
        ([own((3, 0), (4, 0)), own((3, 1)), {}, own((3, 1))], 2, (3, [0, 1], 0)),
        ([own((4, 0)), own((3, 1)), own((3, 0)), own((3, 1))], 2, (3, [2, 1], 1)),
        ([{}, {}], 1, None),
        ([own((4, 0)), own((3, 1))], 2, None),
        # the second rank is new, and the first one has a copy of its shard
        ([own((3, 0), (4, 0)) | copies((2, 1), (3, 1)), {}], 2, (3, [0, 0], 0)),
        # ranks that took other places send their shards to them
        ([own((3, 1)), own((3, 0))], 2, (3, [1, 0], 0)),
        # no rank has the counters of step 3
        ([own((4, 0)) | copies((3, 0), (3, 1)), {}], 2, None),
        # two neighbours are lost
        ([own((3, 0)) | copies((3, 2)), {}, {}], 3, None),
    ],
)
def test_the_latest_step_of_which_all_shards_are_left(offered: list[Keys], width: int, agreed: object) -> None:
    known = [{(*key, width): counts for key, counts in keys.items()} for keys in offered]
    assert agreed_offer(known, width) == agreed
    assert agreed_offer(known, width + 1) is None  # shards of other sizes


def test_connections_that_ranks_accepted_are_severed_and_no_others() -> None:
    before = listening_ports()
    with socket.create_server(("127.0.0.1", 0)) as rank, socket.create_server(("127.0.0.1", 0)) as other:
        assert listening_ports() - before == {rank.getsockname()[1], other.getsockname()[1]}
        ours, theirs = (socket.create_connection(server.getsockname(), timeout=5) for server in (rank, other))
        with ours, theirs:
            accepted, kept = rank.accept()[0], other.accept()[0]
            with accepted, kept:
                sever({rank.getsockname()[1]})
                assert ours.recv(1) == b""
                kept.send(b"x")
                assert theirs.recv(1) == b"x"


def test_a_row_that_the_lost_first_rank_may_not_have_written_is_written_again() -> None:
    model = SimpleNamespace(parameters={})
    state = SimpleNamespace(model=model, kept=None, changed=False, local_parts=list, parts_before=list)
    sampling = SimpleNamespace(held=lambda step: [f"samples in flight after step {step}"], drawing=lambda step: [])
    job: Any = SimpleNamespace(stops=SimpleNamespace(before=Progress(step=4)), progress=Progress(step=5, updates=3))
    vars(job).update(states={"": state}, unconfirmed={"loss": 1.0}, world=SimpleNamespace(rank=1, shard_size=2))
    job.sampling = sampling
    (offered, _, held) = offers_of(job)[5, 0, 1]  # nothing is sharded
    assert offered is not None and offered.unfinished == {"loss": 1.0} and offered.updates == 3
    assert held == ["samples in flight after step 5"]
    assert job.progress.unfinished is None
    job.unconfirmed = None
    offered = offers_of(job)[5, 0, 1][0]
    assert offered is not None and offered.unfinished is None


def test_what_a_rank_kept_as_another_shard_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles are divided anew over other nodes, and what it kept would fill another part of the weights."""
    monkeypatch.setattr(in_place, "KEPT", [{"weight": torch.ones(1)}])
    monkeypatch.setattr(in_place, "place_of_shards", ("actor", 1, 2))
    in_place.placed("actor", 1, 2)
    assert in_place.KEPT
    in_place.placed("actor", 0, 2)
    assert not in_place.KEPT


def test_each_run_of_a_sweep_remembers_its_own_choices(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "generation", place(store, 0))
    chosen = []
    for name, choice in (("a", "1"), ("b", "2"), ("a", "3")):
        monkeypatch.setattr(in_place, "here", lambda name=name: SimpleNamespace(name=name))
        chosen.append(in_place.remembered("cpu_linear", lambda choice=choice: choice))
    assert chosen == ["1", "2", "1"]


def test_a_spare_node_stands_where_the_lost_one_stood(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others keep their ranks; the lost one comes back, and takes the place of the next one that is lost."""
    monkeypatch.setattr(Generation, "current", lambda _: 0)
    store.set("1/3/0", f"{socket.gethostname()} {os.getppid()} 0")  # it waits since before the loss
    places = [(place(store, 0), {1}), (place(store, 2), {1}), (place(store, 3), None)]
    assert numbers(places, monkeypatch) == ["0/3", "2/3", "1/3"]
    assert places[0][0].chosen(1) == [0, 3, 2]
    monkeypatch.setattr(Generation, "current", lambda _: 1)
    store.set("2/1/0", f"{socket.gethostname()} {os.getppid()} 0")
    places = [(place(store, 0), {3}), (place(store, 2), {3}), (place(store, 1), None)]
    assert numbers(places, monkeypatch) == ["0/3", "2/3", "1/3"]
    assert places[0][0].chosen(2) == [0, 1, 2]


def test_neither_a_node_that_is_back_nor_a_spare_one_survived(store: dist.Store) -> None:
    """The first survivor tells of the loss, and the lost one may have come back with a lower number."""
    for node, again in ((0, 1), (1, 0), (2, 0), (3, 0)):
        store.set(f"0/{node}/0", "a 1 0")
        store.set(f"1/{node}/0", f"a 1 {again}")
    store.set("1/nodes", "[0, 3, 2]")
    each = place(store, 2)
    each.number = 1
    assert each.survivors(0) == [2]


def test_a_waiting_node_is_no_reason_to_stop_a_whole_job(store: dist.Store) -> None:
    first = place(store, 0)
    first.number = 0
    store.set("1/3/0", "a 1 0")
    store.add("1/came", 1)
    beats = threading.Event()
    with first.signs.waits(3):
        for _ in range(30):
            assert not first.waiting()
            beats.wait(0.05)
        store.set("0/nodes", "[0, 2]")
        assert first.waiting()


def test_two_nodes_of_one_number(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    each = place(store, 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setattr(
        each, "_choose", lambda *_, **__: [store.set("1/1/0", "other 1 0"), store.set("1/nodes", "[1]")]
    )
    with pytest.raises(ValueError, match=r"^node 1 came twice, from other and from \S+; expected one NODE_RANK each$"):
        each.register(None)


def test_ranks_of_a_nodes_own_torchrun_are_numbered_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a spare node come after the world's, and child processes are no ranks."""
    env = {"PHALANX_STORE": "head:7", "NODE_RANK": "2", "NNODES": "2", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    made = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*env, *made, "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, env.get(name, "0"))
    for _ in range(2):
        join_nodes()
        assert [os.environ[name] for name in made] == ["11", "8", "2", "2", "head", "7"]
    assert "PHALANX_STORE" not in os.environ
