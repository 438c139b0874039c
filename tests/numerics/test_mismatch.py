"""Statistics of log-probabilities that are apart, against the formulas by hand."""

import math

import pytest
import torch

from phalanx.functional.correction import FINITE, by_position, mismatch


def test_the_formulas_by_hand() -> None:
    """Of ratios 1, 1.5 and 0.5; what is not an action does not count."""
    log_ratio = torch.tensor([[0.0, math.log(1.5)], [math.log(0.5), 7.0]])
    mask = torch.tensor([[True, True], [True, False]])
    found = mismatch(log_ratio, mask, 0.2)
    logs = [0.0, math.log(1.5), math.log(0.5)]
    assert found == pytest.approx(
        {
            "median": 0.5,
            "p99": 0.5,
            "largest": 0.5,
            "actions_clipped": 2 / 3,
            "samples_clipped": 1.0,
            "k1": -sum(logs) / 3,
            "k3": sum(math.exp(d) - 1 - d for d in logs) / 3,
            "actions": 3,
        },
        rel=1e-6,
    )
    assert mismatch(log_ratio, mask & False, 0.2) == {}


def test_quantiles_are_those_of_all_actions() -> None:
    """1 to 200 thousandths: the hundredth and the 198th; beyond 0.1 is a half."""
    error = torch.arange(1, 201).double()[torch.randperm(200, generator=torch.Generator().manual_seed(0))] / 1000
    found = mismatch(torch.log1p(error).view(20, 10), torch.ones(20, 10, dtype=torch.bool), 0.1)
    assert [found["median"], found["p99"], found["largest"]] == pytest.approx([0.1, 0.198, 0.2])
    assert found["actions_clipped"] in (0.5, 0.505)  # 0.1 itself is rounded


def test_a_probability_of_zero_is_far() -> None:
    found = mismatch(torch.tensor([[-math.inf, 0.0, math.nan]]), torch.tensor([[True, True, True]]), 0.5)
    assert found["largest"] == FINITE == found["k3"] and found["actions_clipped"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("width", "places"), [(3, [(0, 0), (1, 1), (2, 2)]), (20, [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 19)])]
)
def test_places_of_few_and_of_many_actions(width: int, places: list[tuple[int, int]]) -> None:
    """The last places are without actions here."""
    log_ratio, mask = torch.zeros(2, width), torch.ones(2, width, dtype=torch.bool)
    rows = by_position(log_ratio, mask, 0.1)
    assert [(row["first"], row["last"]) for row in rows] == places
    assert sum(row["actions"] for row in rows) == 2 * width
    mask[:, places[-1][0] :] = False
    assert len(by_position(log_ratio, mask, 0.1)) == len(places) - 1
