"""What each rank writes of a checkpoint, and a file system that is slow on one of them."""

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from phalanx.config.parallel import ParallelConfig
from phalanx.distributed.mesh import World
from phalanx.run import checkpoint
from phalanx.run.checkpoint import Checkpointer, Progress
from phalanx.run.world import start_world
from phalanx.training.checkpoint_contents import share
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


def late(folder: Path) -> tuple[list[str], int, float]:
    """Write a checkpoint for which rank 1 takes 4 s, with limits of 2 s. Returns this rank's warnings, and the step saved."""
    world, messages = start_world(ParallelConfig(timeout_s=2)), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("phalanx").addHandler(handler)
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
