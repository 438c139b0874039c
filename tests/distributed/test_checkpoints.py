"""What each rank writes of a checkpoint, and a file system that is slow on one of them."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phalanx.config.parallel import ParallelConfig
from phalanx.distributed.mesh import World
from phalanx.run import checkpoint
from phalanx.run.checkpoint import Checkpointer, Progress
from phalanx.run.checkpoint_writer import ShareWriter
from phalanx.run.world import start_world
from phalanx.training.checkpoint_contents import share
from tests.helpers.checks import heard
from tests.helpers.ranks import run_ranks

SIZES = {"embedding": 64, "q": 8, "k": 2, "v": 2, "up": 16, "down": 16}


def contents(world: World, value: float) -> dict[str, Any]:
    """Sharded weights with a state of two sharded tensors and a replicated one each, and an average of none."""
    place = [Replicate(), Shard(0)]
    state: dict[str, Any] = {"model": {}, "optim": {}, "average": {}}
    for number, (name, rows) in enumerate(SIZES.items()):
        whole = torch.arange(rows * 3.0).view(rows, 3) + number
        state["model"][name] = distribute_tensor(whole * value, world.mesh, place)
        state["optim"][name] = {
            "m": distribute_tensor(whole * value * 2, world.mesh, place),
            "step": torch.tensor(value),
        }
    return state


def leaves(state: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, value in state.items():
        found |= {f"{name}.{key}": v for key, v in leaves(value).items()} if isinstance(value, dict) else {name: value}
    return found


def saved_and_loaded(folder: Path) -> tuple[dict[str, bool], int, bool]:
    """What this rank writes by name (whether it is a shard), the bytes of its file, and whether all is read back."""
    world = start_world(ParallelConfig(fsdp_size=2))
    state, writer = contents(world, 1.0), Checkpointer(folder, world, {}, 1)
    mine = {name: isinstance(value, DTensor) for name, value in leaves(share(state, world)).items()}
    writer.save(state, Progress(step=1))
    writer.wait()
    kept = folder / "checkpoints" / "step_000001"
    other = contents(world, 0.0)
    writer.load(kept, other)
    wanted, equal = leaves(state), True
    for name, value in leaves(other).items():
        one, two = value, wanted[name]
        equal &= (
            torch.equal(one.full_tensor(), two.full_tensor()) if isinstance(one, DTensor) else torch.equal(one, two)
        )
    size = sum(file.stat().st_size for file in kept.glob(f"__{world.rank}_*"))
    assert writer.locate(str(kept)) == kept and writer.saved_step == 1
    return mine, size, equal


def test_each_shard_is_written_once(tmp_path: Path) -> None:
    """Two replicas of two shards: the plan that rank 0 makes has no item twice, and both replicas write."""
    found = run_ranks(saved_and_loaded, 4, tmp_path)
    names = [name for mine, _, _ in found for name, sharded in mine.items() if sharded]
    assert sorted(names) == sorted(
        [f"model.{name}" for name in SIZES for _ in "12"] + [f"optim.{name}.m" for name in SIZES for _ in "12"]
    )
    whole = [name for mine, _, _ in found for name, sharded in mine.items() if not sharded]
    assert sorted(whole) == sorted(f"optim.{name}.step" for name in SIZES)
    assert all(equal for _, _, equal in found)
    sizes = [size for _, size, _ in found]
    assert min(sizes) > 0.5 * max(sizes)


def equal(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two contents have the same shards on this rank."""
    pairs = zip(leaves(one).values(), leaves(two).values(), strict=True)
    return all(
        torch.equal(a.to_local(), b.to_local()) if isinstance(a, DTensor) else torch.equal(a, b) for a, b in pairs
    )


def four_checkpoints(folder: Path, failing: int) -> tuple[list[int], list[int], list[bool]]:
    """Save four times, with one more tensor in the last two; rank 1 cannot write number `failing`. Returns the sizes of
    the layouts that this rank gets each time, the checkpoints for which it plans, and whether each is read back.
    """
    world = start_world(ParallelConfig(fsdp_size=2))
    writer, sent, planned, step = Checkpointer(folder, world, {}, 9), list[int](), list[int](), 0
    send, make, write = ShareWriter.new_layout, DefaultSavePlanner.create_global_plan, FileSystemWriter.write_data

    def counted(self: ShareWriter, group: Any) -> Any:
        layout = send(self, group)
        sent.append(0 if layout is None else len(layout[1]))
        return layout

    def noted(self: DefaultSavePlanner, plans: Any) -> Any:
        planned.append(step)
        return make(self, plans)

    def broken(self: FileSystemWriter, *args: Any) -> Any:
        if world.rank == 1 and step == failing:
            raise RuntimeError("it broke")
        return write(self, *args)

    def contents_of(step: int, value: float) -> dict[str, Any]:
        state = contents(world, value)
        state["model"] |= {"more": torch.full((2,), value)} if step > 2 else {}
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShareWriter, "new_layout", counted)
        patch.setattr(DefaultSavePlanner, "create_global_plan", noted)
        patch.setattr(FileSystemWriter, "write_data", broken)
        for step in range(1, 5):
            writer.save(contents_of(step, float(step)), Progress(step=step))
            writer.wait()
            assert (writer.saved_step == step) == (step != failing)
    read = []
    for step in {1, 2, 3, 4} - {failing}:
        other = contents_of(step, 0.0)
        writer.load(folder / "checkpoints" / f"step_{step:06d}", other)
        read.append(equal(contents_of(step, float(step)), other))
    return sent, planned, read


@pytest.mark.parametrize(("failing", "planned"), [(0, [1, 3]), (1, [2, 3]), (2, [1, 3])])
def test_a_checkpoint_like_the_last_one_is_not_planned_again(failing: int, planned: list[int], tmp_path: Path) -> None:
    found = run_ranks(four_checkpoints, 4, tmp_path, failing)
    assert [plans for _, plans, _ in found] == [planned, [], [], []]
    assert [len(read) for *_, read in found] == [4 - (failing > 0)] * 4 and all(all(read) for *_, read in found)
    shards, whole = 2 * 2 * len(SIZES), len(SIZES)
    for step, sizes in enumerate(zip(*(sent for sent, _, _ in found), strict=True), start=1):
        if step != failing:
            assert sum(sizes) == (shards + whole + (step > 2) if step in planned else 0), step


def by_torch(folder: Path) -> tuple[bool, bool]:
    """Whether torch reads what is written here, and whether what it writes is read here."""
    world = start_world(ParallelConfig(fsdp_size=2))
    writer, state, other, third = Checkpointer(folder, world, {}, 1), *(contents(world, x) for x in (1.0, 0.0, 0.0))
    writer.save(state, Progress(step=1))
    writer.wait()
    dcp.load(other, checkpoint_id=folder / "checkpoints" / "step_000001")
    dcp.save(state, checkpoint_id=folder / "by_torch")
    (folder / "by_torch" / "meta.json").write_text('{"progress": {"step": 1}}')
    writer.load(folder / "by_torch", third)
    return equal(state, other), equal(state, third)


def test_torch_reads_and_writes_the_same_format(tmp_path: Path) -> None:
    assert run_ranks(by_torch, 4, tmp_path) == [(True, True)] * 4


def late(folder: Path) -> tuple[list[str], int, float]:
    """Write a checkpoint for which rank 1 takes 4 s, with limits of 2 s. Returns this rank's warnings, and the step saved."""
    world, messages = start_world(ParallelConfig(timeout_s=2)), heard("phalanx")
    plain = checkpoint.file_checksum

    def slow(path: Path) -> int:
        time.sleep(4 * world.rank)
        return plain(path)

    checkpoint.file_checksum = slow
    writer = Checkpointer(folder, world, {}, 1, patience_s=1)
    began = time.monotonic()
    writer.save(contents(world, 1.0), Progress(step=1))
    writer.wait()
    return messages, writer.saved_step, time.monotonic() - began


def test_a_late_checkpoint_is_a_warning(tmp_path: Path) -> None:
    (first, saved, seconds), (second, also_saved, _) = run_ranks(late, 2, tmp_path)
    assert saved == also_saved == 1 and seconds > 4
    assert len(first) == 1 and second == []
    assert first[0].startswith("the last checkpoint has not been written after 1 s: training waits; ")


def on_a_slow_file_system(folder: Path, slow: str) -> tuple[int, bool]:
    """Save, find and load a checkpoint with limits of 1.5 s, while one of these takes 3 s on one rank."""
    world, seconds = start_world(ParallelConfig(timeout_s=1.5)), 3.0
    writer, state, other = Checkpointer(folder, world, {}, 1), contents(world, 1.0), contents(world, 0.0)

    def late(name: str, module: Any, rank: int) -> None:
        plain = vars(module)[name]

        def act(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds if name == slow and world.rank == rank else 0)
            return plain(*args, **kwargs)

        setattr(module, name, act)

    late("rmtree", checkpoint.shutil, 0)
    late("find", checkpoint, 0)
    late("damaged", checkpoint, 1)
    late("load_tensors", checkpoint, 1)
    writer.save(state, Progress(step=1))
    writer.wait()
    kept = writer.locate("auto")
    assert kept is not None
    return writer.load(kept, other).step, equal(state, other)


@pytest.mark.quick("find")
@pytest.mark.parametrize("slow", ["rmtree", "find", "damaged", "load_tensors"])
def test_a_slow_file_system_is_not_a_lost_rank(slow: str, tmp_path: Path) -> None:
    """The limit of the collectives of a step does not hold for what waits for files of a checkpoint."""
    assert run_ranks(on_a_slow_file_system, 2, tmp_path, slow) == [(1, True)] * 2


def of_one_tensor(folder: Path) -> bool:
    """Save and load a single replicated tensor; two of three ranks have nothing to write."""
    world = start_world(ParallelConfig(fsdp_size=1))
    writer, loaded = Checkpointer(folder, world, {}, 1), torch.zeros(3)
    writer.save({"model": {"w": torch.arange(3.0)}}, Progress(step=1))
    writer.wait()
    writer.load(folder / "checkpoints" / "step_000001", {"model": {"w": loaded}})
    return loaded.tolist() == [0.0, 1.0, 2.0]


def test_more_ranks_than_tensors(tmp_path: Path) -> None:
    assert run_ranks(of_one_tensor, 3, tmp_path) == [True] * 3
