"""Measurements that all ranks make together: clocks, sums and bandwidths. All ranks must call each function."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.mesh import ACTOR, World
from phalanx.run.link import Link
from phalanx.run.roles import Roles

ROUND_TRIPS = 8
# elements of a message that fits into a packet, of a small one, and of one that is sent in chunks
SUM_SIZES = (1, 1000, 1 << 20)
REPETITIONS = 5
WEIGHT_BYTES = {"cuda": 1 << 30, "cpu": 16 << 20}
TENSOR_BYTES = 8 << 20
MESSAGE_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}


def clock_offset(world: World, clock: Callable[[], float] = time.time) -> float | None:
    """Seconds by which this node's clock is ahead of rank 0's, on the node's first rank; None on other ranks.

    The node asks rank 0 for its time and, as in NTP, assumes that it was read halfway through the round trip; of
    several trips the shortest is used, because its error is smallest.
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
    """Sum known numbers across all ranks; returns a description of the error in this rank's result, or None.

    Small integers in float32 have exact sums in any order.
    """
    for size in SUM_SIZES:
        total = _test_pattern(size, world.device) * _rank_factor(world.rank)
        dist.all_reduce(total)
        problem = wrong_sum(total, world.size)
        if problem is not None:
            return problem
    return None


def wrong_sum(total: Tensor, ranks: int) -> str | None:
    """Describe the error in `total` [N], the sum over `ranks` ranks; None if correct."""
    right = _test_pattern(total.numel(), total.device) * sum(map(_rank_factor, range(ranks)))
    wrong = (total != right).nonzero().flatten()
    if not wrong.numel():
        return None
    i = int(wrong[0])
    first = f"the first is {total[i]:g} and should be {right[i]:g}"
    return f"{wrong.numel()} of {total.numel()} sums are wrong; {first}"


def _test_pattern(size: int, device: torch.device) -> Tensor:
    return (torch.arange(size, device=device) % 7 + 1).float()


def _rank_factor(rank: int) -> int:
    return rank % 16 + 1


def bandwidths(world: World) -> dict[str, float]:
    """Bandwidths in GB (10^9 bytes) per second, as measured on this rank.

    - `all`: all-reduce across all ranks;
    - `node`: all-reduce across the ranks of this node, if it has several;
    - `link`: reception from this rank's counterpart on the preceding node while every rank sends to the next node, if
      there are several nodes.
    """
    size = MESSAGE_BYTES[world.device.type]
    # a row of mesh.start's mesh contains the ranks of a node, a column one rank of each node
    node, link = world.mesh["shard"].get_group(), world.mesh["replicate"].get_group()
    rates = {}
    if world.size > 1:
        rates["all"] = _all_reduce(size, world.device, None)
    if dist.get_world_size(node) > 1:
        rates["node"] = _all_reduce(size, world.device, node)
    if dist.get_world_size(link) > 1:
        rates["link"] = _ring_bandwidth(size, world.device, link)
    return rates


def _all_reduce(size: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Bus bandwidth as in nccl-tests: each link carries 2 (n - 1) / n times the message."""
    tensor = torch.zeros(size // 4, device=device)
    n = dist.get_world_size(group)
    seconds = _median_seconds(lambda: dist.all_reduce(tensor, group=group), device)
    return 2 * (n - 1) / n * size / seconds / 1e9


def _ring_bandwidth(size: int, device: torch.device, group: dist.ProcessGroup) -> float:
    """Bandwidth of a shift by one rank, in which all ranks of `group` send and receive simultaneously."""
    ranks, i = dist.get_process_group_ranks(group), dist.get_rank(group)
    out, into = torch.zeros(size // 4, device=device), torch.zeros(size // 4, device=device)

    def shift() -> None:
        send = dist.P2POp(dist.isend, out, ranks[(i + 1) % len(ranks)], group)
        receive = dist.P2POp(dist.irecv, into, ranks[i - 1], group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return size / _median_seconds(shift, device) / 1e9


def weights_across(world: World, roles: Roles, timeout_s: float) -> float | None:
    """Seconds per GB (10^9 bytes) for sending weights from the actor's first rank to all ranks that sample or score, as
    measured on this rank; None on the actor's other ranks. First connects the roles by the same groups as a job.
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    link = Link(roles, world.rank, dist.PrefixStore("check_cluster", store), world.device)
    size = WEIGHT_BYTES[world.device.type]
    weights = torch.zeros(TENSOR_BYTES // 4, device=world.device)
    names = list(map(str, range(size // TENSOR_BYTES)))
    shapes = dict.fromkeys(names, (weights.shape, weights.dtype))

    def send() -> None:
        link.send_weights(dict.fromkeys(names, weights).items(), shapes)

    def receive() -> None:
        deque(link.receive_weights(shapes), maxlen=0)

    if link.role == ACTOR and world.rank != link.lead:
        return None
    return _median_seconds(send if link.role == ACTOR else receive, world.device) / size * 1e9


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of several repetitions, after a first one that opens the connections."""
    times = []
    for _ in range(1 + REPETITIONS):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":  # the work has only been queued so far
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
