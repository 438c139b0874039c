"""The four ways to weigh actions in a loss, on ragged masks, against sums written out by hand; and over ranks."""

import pytest
import torch

from phalanx.config.run import LOSS_AGG_MODES
from phalanx.functional.aggregation import action_weights, count_actions
from tests.ranks import run_ranks

LENGTHS = [3, 1, 4, 0, 2, 4]
KEPT = torch.tensor([True, True, False, True, True, True])
LOSS = torch.arange(24, dtype=torch.float64).view(6, 4) + 1
MASK = torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]


def expected(mode: str, constant: float | None) -> float:
    """By the definition: units 0, 1, 4 and 5 count, with 3 + 1 + 2 + 4 actions; unit 3 has none."""
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


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown mode 'mean'"):
        action_weights(MASK, KEPT, 10, 4, mode="mean")


def share_of_the_loss(ranks: int, mode: str) -> list[float]:
    """This rank's part of the loss, of each of two optimizer steps."""
    from phalanx.config.run import ParallelConfig
    from phalanx.distributed import mesh
    from phalanx.training.batches import BatchPlan
    from phalanx.training.minibatches import Units, optimizer_steps

    world = mesh.start(ParallelConfig(fsdp_size=1))
    mask = torch.arange(4)[None] < torch.tensor([3, 1, 4, 2, 1, 2, 4, 3])[:, None]
    loss = torch.arange(32, dtype=torch.float64).view(8, 4) + 1
    counted = torch.tensor([True, True, True, False, True, True, True, True])
    plan = BatchPlan(
        samples=8, per_rank=8 // ranks, updates=2, micro=1, actions=1, rollout_micro=1, exact=True, units=8 // ranks
    )
    units = Units.of(torch.arange(8)[:, None], counted, plan, world)
    own = slice(world.rank * plan.per_rank, (world.rank + 1) * plan.per_rank)
    steps = optimizer_steps(mask[own], units, plan, world, mode=mode, constant=5.0)
    return [sum((loss[own][rows] * weight).sum().item() for rows, weight in parts) for parts in steps]


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_loss_does_not_depend_on_the_layout(mode: str) -> None:
    (alone,) = run_ranks(share_of_the_loss, 1, 1, mode)
    for ranks in (2, 4):
        parts = run_ranks(share_of_the_loss, ranks, ranks, mode)
        assert [sum(step) for step in zip(*parts, strict=True)] == pytest.approx(alone, rel=1e-6)
