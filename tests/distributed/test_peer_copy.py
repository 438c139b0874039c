"""Copies of each rank's part of the state on another node, and ranks that receive lost parts from them."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from phalanx.distributed.launch_env import Launch
from phalanx.run import in_memory, peer_copy
from phalanx.run.in_memory import Offers, copies_to_peers, take
from phalanx.run.peer_copy import PeerCopy, packed, unpack
from phalanx.training.progress import Progress
from tests.helpers.ranks import run_ranks


def world_of(width: int) -> Any:
    launch = Launch.from_env()
    mesh = init_device_mesh("cpu", (launch.world_size // width, width), mesh_dim_names=("replicate", "shard"))
    cpu = torch.device("cpu")
    return SimpleNamespace(
        rank=launch.rank, size=launch.world_size, device=cpu, shard_size=width, mesh=mesh, launch=launch
    )


def parts_after(step: int, shard: int) -> list[Tensor]:
    """Parts of several dtypes; the shards are not equally long, and the last one has no row of one of the tensors."""
    base, rows = 100.0 * step + shard, [3, 3, 3, 1][shard]
    low = torch.full((rows, 5), base, dtype=torch.bfloat16)
    return [torch.full((rows, 7), base), torch.full((rows - 1, 2), base), torch.tensor(float(step)), low]


def exchange_twice_and_lose_a_rank() -> tuple[list[bool], list[tuple[int, int]]]:
    """Whether the copies of two steps are right, and the copies that are left after an exchange that is cut off."""
    peer_copy.MESSAGE = 16
    world, peer = world_of(4), PeerCopy()
    source = (world.rank - 2) % 4
    for step in (1, 2, 3):
        peer.update(parts_after(step, world.rank), step, world)
    kept = peer.copies
    right = [bool(kept[step, source].equal(packed(parts_after(step, source)))) for step in (2, 3)]
    dist.barrier()
    if world.rank == 3:
        messages = peer_copy._messages

        def die(*args: Any) -> Any:
            yield next(iter(messages(*args)))
            dist.destroy_process_group()
            raise InterruptedError

        peer_copy._messages = die
    with pytest.raises((RuntimeError, InterruptedError)):
        peer.update(parts_after(4, world.rank), 4, world)
    return right, sorted(peer.copies)


def test_a_copy_that_did_not_arrive_whole_is_none() -> None:
    """All ranks miss the one that is lost, and each has the copy of the step before."""
    for rank, (right, left) in enumerate(run_ranks(exchange_twice_and_lose_a_rank, 4, local_world=2)):
        assert right == [True, True]
        assert left == [(3, (rank - 2) % 4)]


class State:
    """A TrainState of one tensor that is sharded, with uneven shards, and a count that is not."""

    kept, changed, updates = None, False, 0

    def __init__(self, mesh: DeviceMesh, parts: list[Tensor]) -> None:
        sharded = DTensor.from_local(parts[0], mesh["shard"], [Shard(0)], run_check=False)
        self.model, self.parts = SimpleNamespace(parameters={"weight": sharded}), parts

    def loaded(self, updates: int) -> None:
        self.updates = updates

    def local_parts(self) -> list[Tensor]:
        return self.parts

    parts_before = local_parts


def take_from_others(own: list[int | None], copies: dict[int, int]) -> tuple[list[Tensor], Progress | None, int]:
    """This rank's parts, counters and updates after a loss. own: the shard that each rank had, None for a new one.
    copies: shards by the rank that has a copy of one.
    """
    rank, offers = int(os.environ["RANK"]), Offers()
    world = world_of(4)
    had = own[rank]
    if had is not None:
        offers[3, had, 4] = Progress(step=3, updates=6), parts_after(3, had), []
    if rank in copies:
        offers[3, copies[rank], 4] = None, [packed(parts_after(3, copies[rank]))], []
    empty = [torch.zeros_like(part) for part in parts_after(3, rank)]
    state = State(world.mesh, empty)
    taken = take(offers, {"": state}, SimpleNamespace(drawing=lambda step: []), world)
    return state.parts, None if taken is None else taken[0], state.updates


@pytest.mark.parametrize(
    ("own", "copies"),
    [([0, 1, None, None], {0: 2, 1: 3}), ([None, None, 2, 3], {2: 0, 3: 1}), ([2, 3, 0, 1], {})],
    ids=["second node lost", "first node lost", "nodes changed places"],
)
def test_each_rank_gets_its_shard(own: list[int | None], copies: dict[int, int]) -> None:
    for rank, (parts, progress, updates) in enumerate(run_ranks(take_from_others, 4, own, copies, local_world=2)):
        assert progress == Progress(step=3, updates=6) and updates == 6
        for part, wanted in zip(parts, parts_after(3, rank), strict=True):
            assert part.equal(wanted)


def test_two_neighbouring_nodes_that_are_lost() -> None:
    """The copy of the first one was on the second one."""
    for parts, progress, _ in run_ranks(take_from_others, 4, [0, None, None, 3], {0: 3, 3: 2}):
        assert progress is None and not any(part.any() for part in parts)


def test_a_copy_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a copy of 12 bytes is not of 16 bytes of state"):
        unpack(torch.zeros(12, dtype=torch.uint8), [torch.zeros(4)])


def told(asked: bool, in_place: bool, width: int, sharded: bool) -> tuple[bool, list[str]]:
    """Whether a job of two ranks on two nodes copies its state, and the warnings of this rank."""
    lines: list[str] = []
    in_memory.log.warning = lambda text, *words: lines.append(text % words)  # type: ignore[method-assign]
    world = world_of(width)
    state = State(world.mesh, [torch.zeros(1)])
    state.model.parameters |= {} if sharded else {"weight": torch.zeros(1)}
    return copies_to_peers(asked, [state], world, in_place=in_place), lines


@pytest.mark.parametrize(
    ("asked", "in_place", "width", "sharded", "copies", "line"),
    [
        (True, True, 2, True, True, None),
        (False, False, 2, True, False, None),
        (True, False, 2, True, False, "true has no use, since a lost rank ends the job without IN_PLACE=1"),
        (True, True, 1, True, False, "true has no use, since each node has the whole state"),
        (True, True, 2, False, False, "true has no use, since each node has the whole state"),
        (False, True, 2, True, False, "false: no other node has a lost one's part of the state, so that it costs"),
    ],
)
def test_what_a_job_says_of_copies(
    asked: bool, in_place: bool, width: int, sharded: bool, copies: bool, line: str | None
) -> None:
    first, second = run_ranks(told, 2, asked, in_place, width, sharded, local_world=1)
    assert first[0] == second[0] == copies and second[1] == []
    assert [text[: len(f"trainer.peer_copy: {line}")] for text in first[1]] == (
        [] if line is None else [f"trainer.peer_copy: {line}"]
    )
