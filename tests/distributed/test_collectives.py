"""Collectives of all ranks: their results, and how little they send."""

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from phalanx.distributed.collectives import agree, exchange
from tests.helpers.ranks import run_ranks


def _agree(errors: dict[int, str], stops: dict[int, int]) -> tuple[str | None, int]:
    rank = dist.get_rank()
    return agree(errors.get(rank), stops.get(rank, 0))


def test_all_hear_the_error_of_the_lowest_rank_and_the_largest_signal() -> None:
    assert run_ranks(_agree, 3, {}, {}) == [(None, 0)] * 3
    assert run_ranks(_agree, 3, {1: "no OCR", 2: "nor here"}, {0: 2, 2: 15}) == [("rank 1: no OCR", 15)] * 3
    assert run_ranks(_agree, 3, {0: "größer"}, {}) == [("rank 0: größer", 0)] * 3
    assert run_ranks(_agree, 1, {0: "no OCR"}, {0: 2}) == [("no OCR", 2)]


def _collectives(error: str | None) -> list[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        agree(error, 0)
    return sorted(event.key for event in found.key_averages() if event.key.startswith("gloo:"))


def test_where_nothing_is_wrong_one_small_tensor_goes_round() -> None:
    assert run_ranks(_collectives, 2, None) == [["gloo:all_reduce"]] * 2
    assert run_ranks(_collectives, 2, "no OCR") == [["gloo:all_reduce", "gloo:broadcast"]] * 2


def _exchange(sent: dict[int, dict[int, list[int]]]) -> dict[int, list[int]]:
    rank = dist.get_rank()
    parcels = {to: torch.tensor(data, dtype=torch.uint8) for to, data in sent.get(rank, {}).items()}
    received = exchange(parcels, [source for source, targets in sent.items() if rank in targets])
    return {source: data.tolist() for source, data in received.items()}


def test_parcels_of_any_size_go_to_some_of_the_ranks() -> None:
    sent = {0: {2: [1, 2, 3]}, 1: {0: [4], 2: [5, 6]}, 2: {1: [7] * 1000}}
    assert run_ranks(_exchange, 4, sent) == [{1: [4]}, {2: [7] * 1000}, {0: [1, 2, 3], 1: [5, 6]}, {}]
