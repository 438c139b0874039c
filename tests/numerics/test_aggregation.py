"""The four weightings of actions in a loss, on ragged masks and over ranks, against sums written out by hand."""

from typing import Any

import pytest
import torch

from phalanx.config.ranges import LOSS_AGG_MODES
from phalanx.functional.aggregation import action_weights, count_actions
from tests.helpers.ranks import run_ranks

LENGTHS = [3, 1, 4, 0, 2, 4]
KEPT = torch.tensor([True, True, False, True, True, True])
LOSS = torch.arange(24, dtype=torch.float64).view(6, 4) + 1
MASK = torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]


def expected(mode: str, constant: float | None) -> float:
    """The definition: units 0, 1, 4 and 5 count, with 3 + 1 + 2 + 4 actions; unit 3 has no actions."""
    sums = [LOSS[i, :k].sum().item() for i, k in enumerate(LENGTHS) if KEPT[i] and k]
    lengths = [k for i, k in enumerate(LENGTHS) if KEPT[i] and k]
    if mode == "token-mean":
        return sum(sums) / sum(lengths)
    if mode == "seq-mean-token-sum":
        return sum(sums) / len(sums)
    if mode == "seq-mean-token-mean":
        return sum(s / k for s, k in zip(sums, lengths, strict=True)) / len(sums)
    return sum(sums) / len(sums) / (4 if constant is None else constant)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("constant", [None, 16.0])
def test_each_mode_is_its_definition(mode: str, constant: float | None) -> None:
    actions, samples = count_actions(MASK, KEPT).tolist()
    assert (actions, samples) == (10, 4)
    weight = action_weights(MASK, KEPT, actions, samples, mode=mode, constant=constant)
    assert weight.dtype == torch.float32
    assert (weight * LOSS).sum().item() == pytest.approx(expected(mode, constant), rel=1e-6)
    assert not weight[~MASK].any() and not weight[2].any()


def test_all_modes_but_the_sums_agree_where_samples_have_as_many_actions() -> None:
    mask, kept = torch.ones(4, 3, dtype=torch.bool), torch.tensor([True, False, True, True])
    token, sample, mean, norm = (action_weights(mask, kept, 9, 3, mode=mode, constant=None) for mode in LOSS_AGG_MODES)
    torch.testing.assert_close(token, mean)
    torch.testing.assert_close(token, norm)
    torch.testing.assert_close(token, sample / 3)


def share_of_the_loss(ranks: int, mode: str) -> list[float]:
    """This rank's part of the loss in each of two optimizer steps."""
    from phalanx.config.parallel import ParallelConfig
    from phalanx.run.world import start_world
    from phalanx.training.minibatches import BatchPlan, Units, optimizer_steps

    world = start_world(ParallelConfig(fsdp_size=1))
    mask = torch.arange(4)[None] < torch.tensor([3, 1, 4, 2, 1, 2, 4, 3])[:, None]
    loss = torch.arange(32, dtype=torch.float64).view(8, 4) + 1
    counted = torch.tensor([True, True, True, False, True, True, True, True])
    plan = BatchPlan(
        samples=8, per_rank=8 // ranks, updates=2, micro=1, actions=1, rollout_micro=1, exact=True, units=8 // ranks
    )
    own = slice(world.rank * plan.per_rank, (world.rank + 1) * plan.per_rank)
    units = Units.of(torch.arange(8)[:, None], counted, torch.arange(8)[own], world)
    steps = optimizer_steps(mask[own], units, plan, world, mode=mode, constant=5.0)
    return [sum((loss[own][rows] * weight).sum().item() for rows, weight in parts) for parts in steps]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_loss_does_not_depend_on_the_layout(mode: str) -> None:
    (alone,) = run_ranks(share_of_the_loss, 1, 1, mode)
    for ranks in (2, 4):
        parts = run_ranks(share_of_the_loss, ranks, ranks, mode)
        assert [sum(step) for step in zip(*parts, strict=True)] == pytest.approx(alone, rel=1e-6)


def dealt_out(ranks: int, counted: list[bool], updates: int) -> list[list[tuple[int, float]]]:
    """This rank's samples in each optimizer step, by their numbers across ranks, with their weights."""
    from phalanx.config.parallel import ParallelConfig
    from phalanx.run.world import start_world
    from phalanx.training.minibatches import BatchPlan, Units, optimizer_steps

    world = start_world(ParallelConfig(fsdp_size=1))
    n, share = len(counted), len(counted) // ranks
    plan = BatchPlan(
        samples=n, per_rank=share, updates=updates, micro=1, actions=1, rollout_micro=1, exact=True, units=share
    )
    index = torch.arange(share) + world.rank * share
    units = Units.of(torch.arange(n)[:, None], torch.tensor(counted), index, world)
    one_action = torch.ones(share, 1, dtype=torch.bool)
    found = []
    for parts in optimizer_steps(one_action, units, plan, world, mode="token-mean", constant=None):
        rows = torch.cat([rows for rows, _ in parts]) + world.rank * share
        weights = torch.cat([weight for _, weight in parts])[:, 0]
        found.append(list(zip(rows.tolist(), weights.tolist(), strict=True)))
    return found


@pytest.mark.parametrize(
    "kept",
    [range(16), range(0, 16, 2), range(4), (0, 2, 4, 6, 8, 10, 12), (3, 5, 7, 8), (9,)],
    ids=["all", "even numbers", "one group", "seven", "four", "a single one"],
)
def test_what_counts_is_dealt_out_evenly(kept: Any) -> None:
    """If units were dealt out before filtering, one update would have all even numbers, and the other none."""
    counted = [i in kept for i in range(16)]
    (alone,) = run_ranks(dealt_out, 1, 1, counted, 2)
    sizes = [sum(weight > 0 for _, weight in step) for step in alone]
    assert sum(sizes) == len(kept) and max(sizes) - min(sizes) <= 1
    assert len(sizes) == min(2, len(kept))
    for step in alone:
        assert sum(weight for _, weight in step) == pytest.approx(1)
    for ranks in (2, 4):
        parts = run_ranks(dealt_out, ranks, ranks, counted, 2)
        assert len({len(part) for part in parts}) == 1
        for k, step in enumerate(alone):
            assert len({len(part[k]) for part in parts}) == 1  # the same number of micro-batches
            together = [pair for part in parts for pair in part[k] if pair[1] > 0]
            assert together == [pair for pair in step if pair[1] > 0]
            whole = [number for part in parts for number, _ in part[k]]
            assert len(set(whole)) == len(whole)
    if kept == range(16):  # nothing is filtered: step k has the numbers that are k modulo the number of updates
        assert [[number for number, _ in step] for step in alone] == [list(range(0, 16, 2)), list(range(1, 16, 2))]
