"""Sums of metrics: every reduction, on micro-batches of unequal sizes, against torch's on the whole batch."""

import math
from typing import Any

import pytest
import torch

from phalanx.functional.aggregation import Mean, Sums
from phalanx.telemetry.step_metrics import merged_rows
from phalanx.types import Metric
from tests.helpers.checks import normal, reduced

VALUES = normal(7, 5, seed=1)
WEIGHT = (normal(7, 5, seed=2) > 0).float() / 9
WEIGHT[3:5] = 0  # samples that do not count, which alone are a micro-batch below
COUNTED = WEIGHT > 0
PARTS = ([7], [1] * 7, [3, 2, 2], [5, 2])


def in_parts(sizes: list[int], metric: Any) -> Sums:
    """The sums of the metric m(rows) in micro-batches of these sizes."""
    sums = Sums()
    for rows in torch.arange(7).split(sizes):
        sums.add({"m": metric(rows)}, WEIGHT[rows])
    return sums


@pytest.mark.parametrize("sizes", PARTS, ids=str)
def test_reductions(sizes: list[int]) -> None:
    garbage = VALUES.masked_fill(~COUNTED, torch.nan)  # what does not count is never read
    real = VALUES[COUNTED].double()
    for metric, expected in (
        (lambda rows: garbage[rows], real.mean()),
        (lambda rows: Metric(garbage[rows], "std"), real.std(correction=0)),
        (lambda rows: Metric(garbage[rows], "max"), real.max()),
        (lambda rows: VALUES[rows] > 0, (real > 0).double().mean()),
        (lambda rows: VALUES[rows, 0], VALUES[COUNTED.any(1), 0].double().mean()),  # one value per sample
        (lambda rows: Metric(garbage[rows], where=VALUES[rows] > 0.5), real[real > 0.5].mean()),
    ):
        assert in_parts(sizes, metric).values() == {"m": pytest.approx(expected.item(), rel=1e-6)}


@pytest.mark.parametrize("sizes", PARTS, ids=str)
def test_a_number_counts_once_per_action(sizes: list[int]) -> None:
    """A mean that an algorithm takes over a micro-batch's actions is the mean over all, also as a plain float."""
    expected = pytest.approx(VALUES[COUNTED].mean().item(), rel=1e-6)
    for mean in (
        lambda rows: (VALUES[rows] * COUNTED[rows]).sum() / COUNTED[rows].sum().clamp(min=1),  # 0 where nothing counts
        lambda rows: float(VALUES[rows][COUNTED[rows]].mean()),  # NaN where nothing counts
    ):
        assert in_parts(sizes, mean).values() == {"m": expected}


def test_a_maximum_of_the_first_update() -> None:
    assert reduced({"m": Metric(VALUES, "first_max")}, WEIGHT) == {"first_m": VALUES[COUNTED].max().item()}
    for first, expected in ((True, {"first_m": 2.0}), (False, {})):
        sums = Sums(first=first)
        for value in (0.5, torch.tensor(2.0), 1.0):
            sums.add({"m": Metric(value, "first_max")}, WEIGHT[:1])
        sums.add({"m": Metric(9.0, "first_max")}, WEIGHT[3:4])  # of nothing that counts
        assert sums.values() == expected


def test_means_of_parts_merge_into_that_of_all() -> None:
    """Metrics of a step's chunks: ratios of tokens, of calls or of some samples, whose counts differ between chunks."""
    sums = [Sums(), Sums()]
    for part, rows in zip(sums, (slice(0, 2), slice(2, 7)), strict=True):
        part.add({"m": VALUES[rows], "m/max": Metric(VALUES[rows], "max")}, WEIGHT[rows])
    rows = [part.values() for part in sums] + [{"other": Mean(math.nan, 0)}, {"other": Mean(3.0, 2)}]
    merged = merged_rows(rows, [1, 1, 1, 1])
    assert merged == {
        "m": pytest.approx(VALUES[COUNTED].double().mean().item()), "m/max": VALUES[COUNTED].max().item(), "other": 3.0
    }  # fmt: skip
    assert all(type(value) is float for value in merged.values())
    assert merged_rows([{"m": Mean(2.0, 0)}], [1]) == {"m": 2.0}


def test_rewards_are_averaged_whatever_their_names() -> None:
    rows = []
    for value in (1.0, 4.0):
        rows.append({f"reward/{name}": value for name in ("time_s", "per/max", "min", "errors")} | {"time/x": value})
    merged = merged_rows(rows, [2, 1])
    assert merged == {
        "reward/time_s": 2.0, "reward/per/max": 2.0, "reward/min": 1.0, "reward/errors": 5.0, "time/x": 5.0
    }  # fmt: skip


def test_what_nothing_counts_for_is_left_out() -> None:
    nothing = torch.zeros(2, 5)
    metrics = {"mean": VALUES[:2], "max": Metric(VALUES[:2], "max"), "std": Metric(VALUES[:2], "std"), "number": 1.0}
    assert reduced(metrics, nothing) == {}


def test_nan_that_counts_is_seen() -> None:
    values = torch.full((1, 2), torch.nan)
    found = reduced({"mean": values, "std": Metric(values, "std"), "max": Metric(values, "max")}, torch.ones(1, 2))
    assert found.keys() == {"mean", "std", "max"} and all(map(math.isnan, found.values()))


def test_units_of_several_samples() -> None:
    """A unit's samples count if it does."""
    weight = torch.tensor([[1.0, 1.0], [0.0, 0.0]])  # [U, A], of two samples each
    values = torch.arange(8.0).view(4, 2)
    assert reduced({"samples": values, "units": values[:2], "each": values[:, 0]}, weight) == {
        "samples": 1.5,
        "units": 0.5,
        "each": 1.0,
    }


def test_a_small_spread_around_a_large_mean() -> None:
    values = 1 + 1e-3 * normal(1000, 1, seed=4)
    found = reduced({"m": Metric(values, "std")}, torch.ones(1000, 1))
    assert found["m"] == pytest.approx(values.double().std(correction=0).item(), rel=1e-8)


def test_no_gradient_is_kept() -> None:
    sums = Sums()
    sums.add({"m": VALUES.clone().requires_grad_()}, WEIGHT)
    assert not sums.parts["m"].requires_grad


def test_another_shape_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        reduced({"gap": VALUES[:, :, None]}, WEIGHT)
    assert str(error.value) == (
        "the algorithm's metric 'gap' has shape [7, 5, 1]; expected a number, or a value for each action [7, 5] or each "
        "of the micro-batch's 7 units"
    )
