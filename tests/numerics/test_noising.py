"""phalanx.functional.flow: the drawn noise levels and their frequencies."""

import math
import random
import statistics

import pytest
import torch
from torch import Tensor

from phalanx.functional.flow import noise_levels

SCHEDULE = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.25])


def uniform(images: int, numbers: int, seed: int = 0) -> Tensor:
    return torch.rand((images, numbers), generator=torch.Generator().manual_seed(seed))


def levels(random_numbers: Tensor, count: int, distribution: str, shift: float = 1.0) -> Tensor:
    return noise_levels(random_numbers, count, SCHEDULE, distribution=distribution, shift=shift)


def normal_cdf(x: float) -> float:
    return statistics.NormalDist().cdf(x)


def test_schedule_by_hand() -> None:
    # the order of the random numbers is the order of the levels: .1 is the second, .2 the fourth, ...
    numbers = torch.tensor([[0.5, 0.1, 0.9, 0.2, 0.3]])
    expected = torch.tensor([[0.9, 0.5, 0.25, 1.0, 0.75]])
    for count in range(1, 6):
        assert torch.equal(levels(numbers, count, "schedule"), expected[:, :count])
    # more than there are: all of them again, in the same order
    assert torch.equal(levels(uniform(1, 12), 5, "schedule"), levels(uniform(1, 12), 12, "schedule")[:, :5])
    assert torch.equal(levels(numbers, 7, "schedule"), expected[:, [0, 1, 2, 3, 4, 0, 1]])


@pytest.mark.parametrize("count", [1, 3, 5])
def test_schedule_without_repetition_and_all_alike(count: int) -> None:
    found = levels(uniform(20000, 5), count, "schedule")
    assert found.shape == (20000, count)
    assert all(len(set(row)) == count for row in found.tolist())
    for column in found.T:  # each place has each level a fifth of the time: standard deviation sqrt(.16 / 20000)
        shares = torch.stack([(column == level).float().mean() for level in SCHEDULE])
        assert (shares - 0.2).abs().max() < 4.5 * math.sqrt(0.16 / 20000)


def test_two_places_of_a_schedule_are_independent_but_for_repetition() -> None:
    found = levels(uniform(40000, 5), 2, "schedule")
    for a in SCHEDULE:
        for b in SCHEDULE:
            share = ((found[:, 0] == a) & (found[:, 1] == b)).float().mean().item()
            assert share == pytest.approx(0.0 if a == b else 0.05, abs=5 * math.sqrt(0.05 * 0.95 / 40000))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_uniform_is_the_shifted_number(shift: float) -> None:
    numbers = uniform(50, 5)
    expected = [[shift * t / (1 + (shift - 1) * t) for t in row[:4]] for row in numbers.tolist()]
    torch.testing.assert_close(levels(numbers, 4, "uniform", shift), torch.tensor(expected), rtol=1e-6, atol=0)


def test_shift_by_hand() -> None:
    # 3 t / (1 + 2 t): 0, 3/4 / 3/2, 3/2 / 2, 9/4 / 5/2
    numbers = torch.tensor([[0.0, 0.25, 0.5, 0.75]])
    expected = torch.tensor([[0.0, 0.5, 0.75, 0.9]])
    torch.testing.assert_close(noise_levels(numbers, 4, SCHEDULE[:4], distribution="uniform", shift=3.0), expected)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_logit_normal_marginal(shift: float) -> None:
    """Its distribution function is that of a normal distribution at logit(t), after undoing the shift of t."""
    found = levels(uniform(20000, 5), 2, "logit_normal", shift).flatten().tolist()
    for level in (0.1, 0.3, 0.5, 0.7, 0.9):
        before = level / (shift - (shift - 1) * level)
        wanted = normal_cdf(math.log(before / (1 - before)))
        share = sum(t <= level for t in found) / len(found)
        assert share == pytest.approx(wanted, abs=5 * math.sqrt(wanted * (1 - wanted) / len(found)))


def test_logit_normal_is_the_quantile_of_its_number() -> None:
    numbers = uniform(200, 5)
    quantile = statistics.NormalDist().inv_cdf
    expected = [[1 / (1 + math.exp(-quantile(t))) for t in row] for row in numbers.tolist()]
    torch.testing.assert_close(levels(numbers, 5, "logit_normal"), torch.tensor(expected), rtol=1e-5, atol=1e-7)


def test_the_ends_of_the_random_numbers_give_levels() -> None:
    """torch.rand returns 0 .. 1 - 2^-24: neither end leads to infinity."""
    ends = torch.tensor([[0.0, 1 - 2**-24, 0.5, 0.5, 0.5]])
    for distribution in ("schedule", "uniform", "logit_normal"):
        found = levels(ends, 2, distribution, 3.0)
        assert found.min() >= 0 and found.max() <= 1  # and not NaN
        assert found.dtype == torch.float32
    assert found[0, 0] > 0 and found[0, 1] < 1  # the normal numbers are finite, so a level is neither 0 nor 1


def test_each_image_has_its_own() -> None:
    """A row depends only on its own random numbers, not on the other rows or the rank."""
    numbers = uniform(8, 5)
    order = random.Random(0).sample(range(8), 8)
    for distribution in ("schedule", "uniform", "logit_normal"):
        whole = levels(numbers, 3, distribution, 3.0)
        assert torch.equal(levels(numbers[order], 3, distribution, 3.0), whole[order])
        assert torch.equal(torch.cat([levels(row[None], 3, distribution, 3.0) for row in numbers]), whole)


def test_an_unknown_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="'cosine' should be schedule, uniform or logit_normal"):
        levels(uniform(1, 5), 1, "cosine")
