"""One rank of 1,024, with torch's fake process groups, against the plan; and the sockets of a rank of a real world."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from benchmarks.scale import NODE, expect, job, simulate, sockets
from benchmarks.scale_files import contents, layouts
from torch.distributed.checkpoint import FileSystemReader

from phalanx.config.parallel import ParallelConfig
from phalanx.run.checkpoint_writer import ShareWriter
from phalanx.run.world import start_world, stop_world
from phalanx.tools.plan.layout import Cluster
from tests.helpers.ranks import free_port, run_ranks


@pytest.mark.quick("64")
@pytest.mark.parametrize("ranks", [64, 1024])
def test_the_plan_is_what_a_rank_of_many_has(ranks: int, tmp_path: Path) -> None:
    rank, cluster = ranks - NODE - 3, Cluster(ranks // NODE, NODE)
    cfg = job(tmp_path, ranks)
    (found,) = run_ranks(simulate, 1, cfg, cluster, rank, init=False)
    said = expect(cfg, cluster, rank)
    assert found["messages"] == pytest.approx(said.pop("messages"), rel=0.01)
    assert found["weights"] == pytest.approx(said.pop("weights"), rel=0.01)
    assert found["optimizer"] == pytest.approx(said.pop("optimizer"), rel=0.01)
    assert {name: found[name] for name in said} == said  # groups and samples
    assert len(said["replicate"]) == ranks // NODE


def planned(folder: Path, ranks: int) -> tuple[int, float, float]:
    """The parts of tensors in a checkpoint of simulated ranks, and CPU seconds of rank 0 for it and for the next one."""
    writer, of_ranks, seconds = ShareWriter(), layouts(contents(), ranks), list[float]()
    for given in (of_ranks, [None] * ranks):
        begin = time.process_time()
        writer.write_metadata(folder, given)
        seconds.append(time.process_time() - begin)
    return len(FileSystemReader(folder).read_metadata().storage_data), seconds[0], seconds[1]


@pytest.mark.full
def test_rank_0_plans_a_checkpoint_once_however_many_ranks_there_are(tmp_path: Path) -> None:
    """1,680 weights of a LoRA with two moments each, in 8 parts; generous limits."""
    ((few, seconds, _),) = run_ranks(planned, 1, tmp_path, 8, init=False)
    ((many, first, later),) = run_ranks(planned, 1, tmp_path, 1024, init=False)
    assert few == many == 1680 * 3 * 8
    assert first < 4 * seconds and later < 0.1 * first


def _joined(port: int) -> int:
    before = sockets()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCH_GLOO_LAZY_INIT="1")  # as many ranks do
    world = start_world(ParallelConfig(fsdp_size=8))
    for group in (dist.group.WORLD, world.checkpoint_group):
        dist.barrier(group)
    found = sockets() - before
    stop_world()
    return found


def test_a_rank_connects_with_few_others() -> None:
    """With 16 ranks, two groups of all of them with all connections would need 30 sockets."""
    assert max(run_ranks(_joined, 16, free_port(), init=False)[1:]) < 30  # rank 0 has the store
