"""What all ranks agree on, and how little they say for it."""

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from phalanx.distributed.collectives import agree
from tests.ranks import run_ranks


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
