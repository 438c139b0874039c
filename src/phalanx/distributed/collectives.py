"""Collectives across all ranks on small CPU values. Every rank must reach each call."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.launch import Launch
from phalanx.types import JobError

T = TypeVar("T")

_alike = 1

WAIT_S = 1e-3  # a shorter collective is no wait
# The last waits of this rank's main thread: the number of the collective, the same on all ranks, its begin and its end,
# by time.perf_counter. phalanx.telemetry.rank_files writes them down.
waits: deque[tuple[int, float, float]] = deque(maxlen=4096)
_numbers = itertools.count()


@contextmanager
def _timed() -> Iterator[None]:
    """Note a collective in which this rank waits for others."""
    number, begin = next(_numbers), time.perf_counter()
    yield
    end = time.perf_counter()
    if end - begin > WAIT_S:
        waits.append((number, begin, end))


def count_once(alike: int) -> None:
    """From now on runs of `alike` neighbouring ranks hold the same samples: what is gathered or added up over all
    samples takes those of the first rank of each run.
    """
    global _alike
    _alike = alike


def all_gather(value: Tensor) -> Tensor:
    """Concatenate equal-shaped CPU tensors of the ranks that hold different samples, in the order of ranks."""
    return torch.cat(all_gather_apart(value)[::_alike])


def all_gather_apart(value: Tensor) -> list[Tensor]:
    """Equal-shaped CPU tensors of all ranks, in the order of ranks."""
    out = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    with _timed():
        dist.all_gather(out, value.contiguous())
    return out


def all_gather_object(value: T) -> list[T]:
    """Every rank's value, in the order of ranks; for small values that can be pickled."""
    out: list[Any] = [None] * dist.get_world_size()
    with _timed():
        dist.all_gather_object(out, value)
    return out


def broadcast_object(value: T, source: int = 0) -> T:
    """The value of rank `source`, on all ranks."""
    box = [value]
    with _timed():
        dist.broadcast_object_list(box, src=source)
    return box[0]


def reduce_int(value: int, op: str) -> int:
    """The "max" or "sum" of an integer over all ranks."""
    return int(_reduced(torch.tensor([value], dtype=torch.int64), op))


def reduce_float(value: float, op: str) -> float:
    """The "max" or "sum" of a number over all ranks."""
    return float(_reduced(torch.tensor([value], dtype=torch.float64), op))


def reduce_sum(values: Tensor) -> Tensor:
    """The sum of all ranks' CPU tensors of one shape."""
    return _reduced(values.clone(), "sum")


def _reduced(values: Tensor, op: str) -> Tensor:
    """Reduce `values` in place over all ranks."""
    if op == "sum" and dist.get_rank() % _alike:
        values.zero_()
    with _timed():
        dist.all_reduce(values, {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[op])
    return values


def mean_rows(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of all ranks' rows, key by key; each needs the same keys and as many rows."""
    keys = sorted(rows[0])
    values = [[row[key] for key in keys] for row in rows]
    local = torch.tensor(values, dtype=torch.float64).mean(0)
    with _timed():
        dist.all_reduce(local)
    return dict(zip(keys, (local / dist.get_world_size()).tolist(), strict=True))


def agree(error: str | None, stop: int) -> tuple[str | None, int]:
    """Agree on one error and one request to stop, on all ranks.

    The error is that of the lowest rank that has one, with its rank (None where all went well);
    `stop`, the number of a signal that asks the job to stop (0: none), is the largest of all ranks.
    """
    ranks = dist.get_world_size()
    # called at every micro-batch: two numbers per rank are reduced, and texts are sent only where there is an error
    box = torch.tensor([ranks - dist.get_rank() if error else 0, stop], dtype=torch.int64)
    with _timed():
        dist.all_reduce(box, dist.ReduceOp.MAX)
    failed, largest = box.tolist()
    if not failed:
        return None, largest
    first = ranks - failed
    launch = Launch.from_env()  # ranks are named by their number in the world, which may have other roles
    text = broadcast_object(f"rank {launch.rank}: {error}" if launch.world_size > 1 else error, first)
    return text, largest


def on_all_ranks(read: Callable[[], T]) -> T:
    """The result of `read`; JobError, on all ranks, where it raises ValueError on one."""
    problem = None
    try:
        result = read()
    except ValueError as error:
        problem = str(error)
    # only the rank that has a bad image sees the error, and the others would wait for it
    message, _ = agree(problem, 0)
    if message is not None:
        raise JobError(message)
    return result


def from_first(read: Callable[[], T]) -> T:
    """The result of `read` on rank 0, on all ranks; the ValueError that it raises there is raised on all."""
    told: Any = None
    if dist.get_rank() == 0:
        try:
            told = read()
        except ValueError as error:
            told = error
    told = broadcast_object(told)
    if isinstance(told, ValueError):
        raise told
    result: T = told
    return result


def to_first(value: Tensor, source: int) -> None:
    """Fill rank 0's `value` with that of `source`, a contiguous CPU tensor of the same shape and dtype.

    A gather would need memory for every rank's on rank 0. The other ranks may skip this call.
    """
    if source == 0:
        return
    if dist.get_rank() == source:
        dist.send(value, dst=0)
    elif dist.get_rank() == 0:
        dist.recv(value, src=source)


def exchange(parcels: Mapping[int, Tensor], sources: Iterable[int]) -> dict[int, Tensor]:
    """Send `parcels` [K] uint8 on the CPU to the ranks that they are for; returns those of the ranks `sources`, which
    all have one for this rank. Only ranks that have something for one another are connected.
    """
    sizes = {rank: torch.tensor([len(parcel)]) for rank, parcel in parcels.items()}
    coming = {rank: torch.empty(1, dtype=torch.int64) for rank in sources}
    _swap(sizes, coming)
    received = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in coming.items()}
    _swap(parcels, received)
    return received


def _swap(sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
    """Send tensors to ranks, and fill those that come from others."""
    operations = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sent.items()]
    operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in received.items()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def gather_object(value: T) -> list[T]:
    """Every rank's value on rank 0, in the order of ranks; an empty list on the others."""
    out: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, out, dst=0)
    return out or []
