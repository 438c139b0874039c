"""Collectives of all ranks on small CPU values. Every rank must reach each call."""

import itertools
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.launch_env import Launch
from phalanx.types import JobError

T = TypeVar("T")

_alike = 1  # see count_once

WAIT_S = 1e-3  # shorter collectives do not count as waits
# The last waits of this rank: the number of the collective, which is the same on all ranks, its start and its end, by
# time.perf_counter. phalanx.run.telemetry.rank_files writes them to a file.
waits: deque[tuple[int, float, float]] = deque(maxlen=4096)
_numbers = itertools.count()


@contextmanager
def _record_wait() -> Iterator[None]:
    """Record a collective in which this rank waits for others."""
    number, begin = next(_numbers), time.perf_counter()
    yield
    end = time.perf_counter()
    if end - begin > WAIT_S:
        waits.append((number, begin, end))


def count_once(alike: int) -> None:
    """Declare that each group of `alike` neighbouring ranks shares the same samples, so that from then on `all_gather`,
    `all_gather_rows` and sums count only the first rank of each group.
    """
    global _alike
    _alike = alike


def local_numbers(total: int, data_rank: int, data_size: int) -> Tensor:
    """The numbers [B] of a rank's samples, of `total` over all ranks: each has as many, one after another."""
    count = total // data_size
    return torch.arange(data_rank * count, (data_rank + 1) * count)


def all_gather(value: Tensor) -> Tensor:
    """Concatenate CPU tensors of the same shape from the ranks with different samples, in rank order."""
    return torch.cat(all_gather_apart(value)[::_alike])


def all_gather_apart(value: Tensor) -> list[Tensor]:
    """CPU tensors of the same shape from all ranks, in rank order."""
    out = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    with _record_wait():
        dist.all_gather(out, value.contiguous())
    return out


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Values of all ranks, in rank order. For small values that can be pickled. group: one of all ranks, if its time
    limit shall hold.
    """
    out: list[Any] = [None] * dist.get_world_size()
    with _record_wait():
        dist.all_gather_object(out, value, group)
    return out


def all_gather_rows(row: T) -> list[T]:
    """Values of the ranks with different samples, in rank order: see all_gather_object."""
    return all_gather_object(row)[::_alike]


def broadcast_object(value: T, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Broadcast the value of rank `source` to all ranks. group: see all_gather_object."""
    box = [value]
    with _record_wait():
        dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def same_everywhere(value: object) -> bool:
    """Whether all ranks have a value with the same text."""
    digest = zlib.crc32(repr(value).encode())
    return reduce_int(digest, "max") == -reduce_int(-digest, "max")


def reduce_int(value: int, op: str) -> int:
    """The "max" or "sum" of an integer over all ranks."""
    return int(_reduce_values(torch.tensor([value], dtype=torch.int64), op))


def reduce_float(value: float, op: str) -> float:
    """The "max" or "sum" of a number over all ranks."""
    return float(_reduce_values(torch.tensor([value], dtype=torch.float64), op))


def reduce_sum(values: Tensor) -> Tensor:
    """The sum over all ranks of CPU tensors of the same shape."""
    return _reduce_values(values.clone(), "sum")


def _reduce_values(values: Tensor, op: str) -> Tensor:
    """Reduce `values` in place over all ranks."""
    if op == "sum" and dist.get_rank() % _alike:
        values.zero_()
    with _record_wait():
        dist.all_reduce(values, {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}[op])
    return values


def agree(error: str | None, stop: int) -> tuple[str | None, int]:
    """Agree across all ranks on one error and one request to stop.

    Returns the error of the lowest rank that has one, with the rank's number (None if no rank has one), and the largest
    `stop` of all ranks, the number of a signal that asks the job to stop (0: none).
    """
    ranks = dist.get_world_size()
    # called for every micro-batch: only two numbers per rank are reduced, and text is sent only if there is an error
    box = torch.tensor([ranks - dist.get_rank() if error else 0, stop], dtype=torch.int64)
    with _record_wait():
        dist.all_reduce(box, dist.ReduceOp.MAX)
    failed, largest = box.tolist()
    if not failed:
        return None, largest
    first = ranks - failed
    launch = Launch.from_env()  # messages use a rank's number among the ranks of all roles
    text = broadcast_object(f"rank {launch.rank}: {error}" if launch.world_size > 1 else error, first)
    return text, largest


def on_all_ranks(read: Callable[[], T], kind: type[Exception] = ValueError) -> T:
    """The result of `read`. Raises JobError on all ranks if it raises an error of this kind on one."""
    problem: Exception | None = None
    try:
        result = read()
    except kind as error:
        problem = error
    # only the rank with a bad image sees the error, and the others would wait for that rank
    message, _ = agree(None if problem is None else str(problem), 0)
    if message is not None:
        raise JobError(message) from problem
    return result


def from_first(read: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Broadcast the result of `read` on rank 0 to all ranks. A ValueError that it raises there is raised on all. group:
    see all_gather_object.
    """
    outcome: Any = None
    if dist.get_rank() == 0:
        try:
            outcome = read()
        except ValueError as error:
            outcome = error
    outcome = broadcast_object(outcome, group=group)
    if isinstance(outcome, ValueError):
        raise outcome
    result: T = outcome
    return result


def to_first(value: Tensor, source: int) -> None:
    """Copy the `value` of rank `source` into rank 0's `value`, both contiguous CPU tensors of the same shape and dtype.

    A gather would need memory for the values of all ranks on rank 0. Other ranks may skip this call.
    """
    if source == 0:
        return
    if dist.get_rank() == source:
        dist.send(value, dst=0)
    elif dist.get_rank() == 0:
        dist.recv(value, src=source)


def exchange(parcels: Mapping[int, Tensor], sources: Iterable[int]) -> dict[int, Tensor]:
    """Send uint8 CPU tensors [K] to other ranks and receive one from each rank in `sources`.

    parcels: maps the receiving ranks to the tensors. Returns the received tensors by rank; each of `sources` must send
    one to this rank. Only ranks that exchange tensors are connected.
    """
    sizes = {rank: torch.tensor([len(parcel)]) for rank, parcel in parcels.items()}
    coming = {rank: torch.empty(1, dtype=torch.int64) for rank in sources}
    exchange_tensors(sizes, coming)
    received = {rank: torch.empty(int(size), dtype=torch.uint8) for rank, size in coming.items()}
    exchange_tensors(parcels, received)
    return received


def exchange_tensors(sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
    """Send contiguous tensors to ranks, and receive those from other ranks in place, all on one kind of device."""
    operations = [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sent.items()]
    operations += [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in received.items()]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def gather_object(value: T) -> list[T]:
    """Values of all ranks on rank 0, in rank order; an empty list on the others."""
    out: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, out, dst=0)
    return out or []
