"""What the ranks find out together: clocks, sums, and how fast the network is. All ranks call each function."""

import statistics
import time
from collections.abc import Callable
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.mesh import World

ROUND_TRIPS = 8
SUM_SIZES = (1, 1000, 1 << 20)  # numbers: a message that fits a packet, a small one, one that is cut into pieces
REPETITIONS = 5
MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}


def clock_offset(world: World, clock: Callable[[], float] = time.time) -> float | None:
    """Seconds that the clock of this node is ahead of rank 0's, measured by its first rank (None on the others).

    Rank 0 is asked for its time, which was read halfway through the round trip; the shortest trip errs least.
    """
    box = torch.zeros(1, dtype=torch.float64)
    if world.rank == 0:
        for first in range(world.shard_size, world.size, world.shard_size):
            for _ in range(ROUND_TRIPS):
                dist.recv(box, first)
                box[0] = clock()
                dist.send(box, first)
        return 0.0
    if world.rank % world.shard_size:
        return None
    shortest, offset = inf, 0.0
    for _ in range(ROUND_TRIPS):
        begin = clock()
        dist.send(box, 0)
        dist.recv(box, 0)
        end = clock()
        if end - begin < shortest:
            shortest, offset = end - begin, (begin + end) / 2 - float(box)
    return offset


def check_sums(world: World) -> str | None:
    """Add known numbers up over all ranks; says what is wrong with the sum that this rank gets, None where it is right.

    Small integers in float32 have exact sums in any order.
    """
    for size in SUM_SIZES:
        total = _pattern(size, world.device) * _factor(world.rank)
        dist.all_reduce(total)
        problem = wrong_sum(total, world.size)
        if problem is not None:
            return problem
    return None


def wrong_sum(total: Tensor, ranks: int) -> str | None:
    """What is wrong with the sum [N] of the numbers of `ranks` ranks, or None."""
    right = _pattern(total.numel(), total.device) * sum(_factor(rank) for rank in range(ranks))
    wrong = (total != right).nonzero().flatten()
    if not wrong.numel():
        return None
    i = int(wrong[0])
    return f"{wrong.numel()} of {total.numel()} sums are wrong; the first is {total[i]:g} and should be {right[i]:g}"


def _pattern(size: int, device: torch.device) -> Tensor:
    return (torch.arange(size, device=device) % 7 + 1).float()


def _factor(rank: int) -> int:
    return rank % 16 + 1


def bandwidths(world: World) -> dict[str, float]:
    """GB (10^9 bytes) a second, as this rank sees it.

    - `all`: all-reduce over all ranks;
    - `node`: all-reduce over the ranks of this node, where it has several;
    - `link`: what this rank receives from its counterpart on the node before, while each rank of the world sends to
      the node after its own; where there are several nodes.
    """
    size = MESSAGE_BYTES[world.device.type]
    node, link = world.mesh["shard"].get_group(), world.mesh["replicate"].get_group()
    found = {}
    if world.size > 1:
        found["all"] = _all_reduce(size, world.device, None)
    if dist.get_world_size(node) > 1:
        found["node"] = _all_reduce(size, world.device, node)
    if dist.get_world_size(link) > 1:
        found["link"] = _ring(size, world.device, link)
    return found


def _all_reduce(size: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Bus bandwidth: of an all-reduce over n ranks, each link carries 2 (n - 1) / n times the message."""
    tensor, n = torch.zeros(size // 4, device=device), dist.get_world_size(group)
    return 2 * (n - 1) / n * size / _seconds(lambda: dist.all_reduce(tensor, group=group), device) / 1e9


def _ring(size: int, device: torch.device, group: dist.ProcessGroup) -> float:
    ranks, place = dist.get_process_group_ranks(group), dist.get_rank(group)
    out, into = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)

    def shift() -> None:
        send = dist.P2POp(dist.isend, out, ranks[(place + 1) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, into, ranks[place - 1], group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return size / _seconds(shift, device) / 1e9


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of some repetitions after a first one, in which connections are made."""
    times = []
    for _ in range(1 + REPETITIONS):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
