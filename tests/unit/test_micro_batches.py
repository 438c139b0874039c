"""The micro-batches of an update: all fields of a sample stay together, and corrections reach the loss."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.functional.flow import Noised
from phalanx.training.minibatches import Minibatches, Units
from phalanx.types import Samples
from tests.helpers.policies import make_policy, make_rollout, one_rank, sample

WINDOW = 2


@pytest.fixture(scope="module")
def samples(sd3_folder: Path) -> Samples:
    with one_rank() as world:
        return sample(make_rollout(make_policy(world, sd3_folder), 3))


def batches(samples: Samples) -> Minibatches:
    number = torch.arange(len(samples.index), dtype=torch.float32)
    noised = Noised(number[:, None, None].expand(-1, WINDOW, 3), number[:, None].expand(-1, WINDOW) / 10)
    every = torch.ones(len(number), dtype=torch.bool)
    places = torch.arange(len(number))
    units = Units(every, torch.zeros_like(places), places, places[:, None], every)
    return Minibatches(samples, number, units, torch.device("cpu"), {"old": number * 2}, noised)


def test_all_parts_of_a_sample_go_with_it(samples: Samples) -> None:
    rows = torch.tensor([4, 0, 3])
    batch = batches(samples).select(rows, torch.tensor([[0.5, 0.5], [0, 0], [0.25, 0.25]]))
    for name in ("latents", "means", "clean", "prompt_index"):
        assert torch.equal(vars(batch.trace)[name], vars(samples.trace)[name][rows]), name
    assert torch.equal(batch.log_prob, samples.log_prob[rows])
    assert batch.advantage.tolist() == [4, 0, 3] and batch.reference_outputs["old"].tolist() == [8, 0, 6]
    assert batch.weight.tolist() == [[0.5, 0.5], [0, 0], [0.25, 0.25]]
    assert batch.corrupted.noise[:, 0, 0].tolist() == [4, 0, 3]
    assert torch.equal(batch.corrupted.levels[:, 1], torch.tensor([4, 0, 3]) / 10)


def test_a_correction_goes_with_its_actions(samples: Samples) -> None:
    """As a separate field if the algorithm only weights its surrogate, otherwise as part of the weights."""
    factors = torch.tensor([[1.0, 0.0]] * len(samples.index))
    step, rows, weight = batches(replace(samples, weight=factors)), torch.tensor([1, 2]), torch.tensor([[0.5] * 2] * 2)
    batch = step.select(rows, weight)
    assert batch.weight.tolist() == weight.tolist()
    assert batch.correction is not None and batch.correction.tolist() == [[1, 0], [1, 0]]
    whole = replace(step, corrects=False).select(rows, weight)
    assert whole.weight.tolist() == [[0.5, 0], [0.5, 0]] and whole.correction is None


def test_fresh_noise_leads_from_image_to_noise() -> None:
    clean: Tensor = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    noised = Noised(torch.tensor([[[5.0, 0.0]], [[1.0, 1.0]]]), torch.tensor([[0.25], [1.0]]))
    assert noised.latents(clean).tolist() == [[[2.0, 1.5]], [[1.0, 1.0]]]
    assert noised.target(clean).tolist() == [[[4.0, -2.0]], [[-2.0, 2.0]]]


def test_each_optimizer_step_is_balanced() -> None:
    """12 units, two of which do not count, on two ranks: expensive units of a step go to different ranks."""
    counted = torch.ones(12, dtype=torch.bool)
    counted[[2, 9]] = False
    numbers = torch.arange(12)
    units = Units(counted, numbers // 6, numbers[:6], numbers[:6, None], counted[:6])
    costs = torch.tensor([8, 1, 9, 7, 1, 6, 1, 1, 2, 9, 2, 1], dtype=torch.float64)
    dealt = units.dealt(2)
    assert dealt.tolist() == [0, 1, -1, 0, 1, 0, 1, 0, 1, -1, 0, 1]
    ranks = units.balanced(costs, 2, 2)
    # of the first step 8 + 2 + 1, and 7 + 6; of the second 2 + 1, and 1 + 1 + 1; and 9, and 9
    assert [numbers[(dealt == k) & (ranks == 0)].tolist() for k in (0, 1, -1)] == [[0, 7, 10], [6, 8], [2]]
    assert ranks.bincount().tolist() == [6, 6]
    # nothing moves where nothing is gained
    assert units.balanced(torch.ones(12, dtype=torch.float64), 2, 2) is units.ranks
