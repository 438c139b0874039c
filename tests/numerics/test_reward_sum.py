"""The sum of a reward's terms: values by hand."""

import pytest
import torch

from phalanx import algorithms
from phalanx.config.flow import FlowRLConfig
from phalanx.functional.advantage import Share, check_range, combine
from phalanx.run.rules import load_config
from phalanx.types import JobError

OCR = torch.tensor([0.0, 1.0, 0.5, 0.5])
SIZE = torch.tensor([30.0, 10.0, -20.0, 400.0])
GROUPS = torch.tensor([0, 0, 1, 1])


def test_rewards_that_have_no_std_are_refused() -> None:
    check_range(torch.tensor([1e18, -1e18, torch.nan]))
    check_range(torch.zeros(0))
    for value in (1e19, -1e38, torch.inf):
        with pytest.raises(
            JobError, match=r"^reward: the weighted sum of the terms is .* for a sample; expected at most 1e\+18"
        ):
            check_range(torch.tensor([0.0, value, torch.nan]))


def test_weighted_sum() -> None:
    total = combine([OCR, SIZE], [Share(2.0), Share(-0.1)])
    torch.testing.assert_close(total, torch.tensor([-3.0, 1.0, 3.0, -39.0]))


def test_scores_are_clipped_before_they_are_weighted() -> None:
    assert combine([SIZE], [Share(0.5, clip=(0.0, 20.0))]).tolist() == [10, 5, 0, 10]


def test_a_weight_goes_on_a_straight_line_and_stays() -> None:
    share = Share(weight=1.0, initial_weight=0.2, weight_steps=4)
    assert [share.at(step) for step in (0, 1, 3, 4, 99)] == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0])
    assert share.at(None) == 1.0 and Share(weight=3.0, weight_steps=7).at(2) == 3.0
    assert combine([OCR], [share], step=1).tolist() == pytest.approx([0.0, 0.4, 0.2, 0.2])


def test_terms_are_normalised_within_their_group() -> None:
    # group 0: OCR 0, 1 -> -1, 1 (std .5); SIZE 30, 10 -> 1, -1; group 1: OCR equal -> 0; SIZE -20, 400 -> -1, 1
    total = combine([OCR, SIZE], [Share(1.0), Share(0.25)], group_id=GROUPS)
    torch.testing.assert_close(total, torch.tensor([-0.75, 0.75, -0.25, 0.25]), atol=3e-4, rtol=0)
    # the scale of a term has no effect
    scaled = combine([OCR, SIZE * 1000], [Share(1.0), Share(0.25)], group_id=GROUPS)
    torch.testing.assert_close(scaled, total, atol=3e-4, rtol=0)
    # terms may cancel
    opposite = combine([OCR, -3 * OCR], [Share(1.0), Share(1.0)], group_id=GROUPS)
    assert opposite.abs().max() < 1e-5
    # clipping comes first: 20, 10 of group 0 and 0, 20 of group 1
    clipped = combine([SIZE], [Share(1.0, clip=(0.0, 20.0))], group_id=GROUPS)
    torch.testing.assert_close(clipped, torch.tensor([1.0, -1.0, -1.0, 1.0]), atol=3e-4, rtol=0)


@pytest.mark.parametrize("normalize", ["gdpo", "group"])
def test_gdpo_divides_the_sum_by_the_std_of_the_batch(normalize: str) -> None:
    """In float64 with the paper's two formulas; `group` divides by each group's std, so agreements count the same."""
    cfg = load_config(FlowRLConfig, None, ["model.path=x", f"reward.normalize={normalize}"])
    generator = torch.Generator().manual_seed(0)
    terms = [torch.rand(3, 8, generator=generator).double() for _ in range(2)]
    normalised = [(t - t.mean(1, keepdim=True)) / t.std(1, correction=0, keepdim=True) for t in terms]
    total = 2 * normalised[0] - 0.5 * normalised[1]
    std = total.std(correction=0) if normalize == "gdpo" else total.std(1, correction=0, keepdim=True)
    group_id = torch.arange(24) // 8
    summed = combine([t.flatten().float() for t in terms], [Share(2.0), Share(-0.5)], group_id=group_id)
    found = algorithms.build(cfg.algorithm).advantage(summed, group_id)
    torch.testing.assert_close(found, (total / std).flatten().float(), atol=5e-4, rtol=0)
