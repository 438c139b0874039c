"""The groups between roles: ranks that are late by random times get the same weights, and leave without an error."""

import os
import random
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config.parallel import ParallelConfig
from phalanx.run import link as links
from phalanx.run.world import start_world, stop_world
from tests.helpers.ranks import free_port, run_ranks

SHAPES = {f"w{i}": (torch.Size([40 + i, 10]), torch.float32) for i in range(6)}


def late() -> None:
    time.sleep(random.random() / 50)


def syncs(port: int) -> tuple[list[float], float]:
    """Three syncs of buckets that the actor's two ranks gather as FSDP does; then all leave."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    links.BUCKET_BYTES = 4000  # two tensors
    world = start_world(ParallelConfig(), {"rollout": "0-1", "actor": "2-3"})
    random.seed(world.launch.rank + os.getpid())
    link, sums = world.link, []
    assert link is not None
    link.meet()

    def gathered(version: int) -> Iterator[tuple[str, Tensor]]:
        for i, (name, (shape, _)) in enumerate(SHAPES.items()):
            late()
            part = torch.full([shape.numel() // 2], float(version * 10 + i))
            whole = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(whole, part)
            yield name, torch.cat(whole).view(shape)

    for version in range(3):
        link.order(links.Order(version))
        if link.role == "actor":
            link.send_weights(gathered(version), SHAPES)
            continue
        for _, value in link.receive_weights(SHAPES):
            late()
            sums.append(float(value.mean()))
    late()
    begin = time.perf_counter()
    link.part(world.watch)
    stop_world()
    return sums, time.perf_counter() - begin


def test_late_ranks_get_all_weights_and_leave() -> None:
    first, second, *actors = run_ranks(syncs, 4, free_port(), init=False, timeout=100)
    assert first[0] == second[0] == [10.0 * version + i for version in range(3) for i in range(6)]
    assert [sums for sums, _ in actors] == [[], []]
