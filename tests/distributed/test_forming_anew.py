"""Ranks that meet again after a loss: another one that is lost meanwhile, and a state that no rank has."""

import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import group_of
from phalanx.run import in_place
from phalanx.run.generations import Generation
from tests.helpers.ranks import run_ranks


def meet(store: dist.Store, rank: int, size: int) -> None:
    """Make the groups of a world."""
    with in_place.connecting() as most:
        limit = min(timedelta(seconds=60), most)
        dist.init_process_group("gloo", None, limit, size, rank, store)
        init_device_mesh("cpu", (1, size), mesh_dim_names=("replicate", "shard"))
        group_of(range(size), limit.total_seconds())


def lose_one_and_meet_again(folder: Path) -> tuple[float, float]:
    """Seconds until the loss is noticed, and what the ranks agree on when all are there."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    in_place.CONNECTING_S = 2.0
    store = dist.FileStore(str(folder / "meeting"), -1)
    generation = Generation(rank, size, Launch.from_env(), store, set(), number=1)
    generation.register = lambda dead: None  # type: ignore[method-assign]  # who takes part is another test's matter
    for number in range(2):
        generation.at(number).set("nodes", "[0, 1, 2]")
        generation.at(number).set(f"{rank}/0", "the first start")
    in_place.generation = generation
    begin, noticed = time.monotonic(), 0.0
    if rank < 2:  # the third one is lost after it has come
        with pytest.raises(RuntimeError) as lost:
            meet(dist.PrefixStore("first", store), rank, size)
        noticed = time.monotonic() - begin
        assert in_place.survives(lost.value, lost=False), lost.value
        in_place.drop_groups()
    store.add("again", 1)
    while store.add("again", 0) < size:
        time.sleep(0.01)
    meet(dist.PrefixStore("second", store), rank, size)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return noticed, total.item()


def test_a_rank_that_is_lost_while_the_others_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs the others CONNECTING_S and not the job's time limit, and they can meet again."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")  # of this process, whose copies the ranks are
    for noticed, total in run_ranks(lose_one_and_meet_again, 3, tmp_path, init=False, timeout=60):
        assert noticed < 20 and total == 6.0


def take_nothing() -> tuple[object, list[str]]:
    said: list[str] = []
    in_place.say = said.append  # type: ignore[assignment]
    in_place.generation = Generation(0, 1, Launch.from_env(), dist.HashStore(), set(), number=1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    world = SimpleNamespace(rank=dist.get_rank(), shard_size=1, mesh=mesh)
    return in_place.taken({}, SimpleNamespace(), world), said  # type: ignore[arg-type]


def test_a_state_that_nobody_has() -> None:
    """The job then starts from its last checkpoint, and says so once."""
    first, second = run_ranks(take_nothing, 2)
    assert first == (None, ["no rank has the state after the last step: the job starts from its last checkpoint"])
    assert second == (None, [])
