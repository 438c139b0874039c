"""Estimates for k of n samples against all choices of k, and the coverage of intervals."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from phalanx.functional.statistics import (
    Estimate,
    best_of_k,
    majority_at_k,
    mean_interval,
    paired_interval,
    pass_at_k,
    t_half_width,
    t_quantile,
)


def over_subsets(n: int, k: int, value: Callable[[Sequence[int]], float]) -> float:
    return float(np.mean([value(chosen) for chosen in itertools.combinations(range(n), k)]))


@pytest.mark.parametrize("k", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(k: int) -> None:
    for passed in range(8):
        marks = [1.0] * passed + [0.0] * (7 - passed)
        expected = over_subsets(7, k, lambda chosen, marks=marks: max(marks[i] for i in chosen))
        assert pass_at_k(passed, 7, k) == pytest.approx(expected, abs=1e-12)
        assert best_of_k(np.array(marks), k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", range(1, 8))
def test_best_of_k_is_the_mean_over_all_subsets(k: int) -> None:
    scores = np.random.default_rng(k).normal(size=7).round(1)  # some are equal
    expected = over_subsets(7, k, lambda chosen: max(scores[i] for i in chosen))
    assert best_of_k(scores, k) == pytest.approx(expected, abs=1e-12)


def winner(answers: Sequence[str | None], scores: np.ndarray, chosen: Sequence[int]) -> float:
    def score(answer: str | None) -> float:
        return float(np.mean([scores[i] for i in range(len(answers)) if answers[i] == answer]))

    votes = Counter(answers[i] for i in chosen if answers[i] is not None)
    if not votes:
        return score(None)
    most = max(votes.values())
    return float(np.mean([score(answer) for answer, count in votes.items() if count == most]))


@pytest.mark.parametrize("answers", ["aabbc--", "abcdefg", "aaabbcc", "-------", "aaaa---", "aabbccd"])
def test_majority_is_the_mean_over_all_subsets(answers: str) -> None:
    given = [None if letter == "-" else letter for letter in answers]
    scores = np.array([{"a": 1.0, "b": 0.25}.get(letter, 0.1 * i) for i, letter in enumerate(answers)])
    for k in range(1, 8):
        expected = over_subsets(7, k, lambda chosen: winner(given, scores, chosen))
        assert majority_at_k(given, scores, k) == pytest.approx(expected, abs=1e-12)


def test_quantiles_of_t() -> None:
    tables = {1: 12.706, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 29: 2.0452, 1000: 1.9623}
    for degrees, expected in tables.items():
        assert t_quantile(0.975, degrees) == pytest.approx(expected, rel=2e-3)


def test_interval_of_marks_is_wilsons() -> None:
    # 15 of 20, by hand: centre (0.75 + 0.09604) / 1.19207, half 1.64418 * sqrt(0.009375 + 0.002401)
    estimate = mean_interval(np.array([1.0] * 15 + [0.0] * 5))
    assert (estimate.value, estimate.count) == (0.75, 20)
    assert estimate.low == pytest.approx(0.5313, abs=1e-4)
    assert estimate.high == pytest.approx(0.8881, abs=1e-4)
    none = mean_interval(np.zeros(10))
    assert (none.low, none.high) == (0.0, pytest.approx(0.2775, abs=1e-4))


def test_interval_of_other_values_is_students() -> None:
    values = np.array([0.5, 1.5, 2.5])
    half = 4.3027 / math.sqrt(3)
    assert t_half_width(values) == pytest.approx(half, abs=1e-4)
    assert mean_interval(values) == Estimate(
        1.5, pytest.approx(1.5 - half, abs=1e-4), pytest.approx(1.5 + half, abs=1e-4), 3
    )
    assert mean_interval(np.array([0.5])) == Estimate(0.5, None, None, 1)
    assert t_half_width(np.array([0.5])) is None


def test_a_bootstrap_repeats_and_pairs() -> None:
    generator = np.random.default_rng(0)
    prompts = generator.normal(size=50) * 10
    values = prompts + 0.5 + 0.1 * generator.normal(size=50)
    estimate = paired_interval(values, prompts)
    assert estimate == paired_interval(values, prompts)
    assert estimate != paired_interval(values, prompts, seed=1)
    assert estimate.low is not None and 0.4 < estimate.low < estimate.value < 0.6  # prompts differ a hundred times more
    same = paired_interval(prompts, prompts)
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    assert paired_interval(values[:1], prompts[:1]).low is None


def coverage(
    count: int,
    draw: Callable[[np.random.Generator], np.ndarray],
    truth: float,
    interval: Callable[[np.ndarray], Estimate],
) -> float:
    generator, covered = np.random.default_rng(count), 0
    for _ in range(400):
        estimate = interval(draw(generator))
        assert estimate.low is not None and estimate.high is not None
        covered += estimate.low <= truth <= estimate.high
    return covered / 400


@pytest.mark.parametrize("count", [2, 5, 10, 40])
def test_intervals_hold_the_truth_as_often_as_they_say(count: int) -> None:
    """400 draws: a coverage of 0.95 has a standard error of 0.011."""

    def means(generator: np.random.Generator) -> np.ndarray:  # of 4 samples of prompts of unequal difficulty
        return generator.binomial(4, generator.beta(2, 2, size=count)) / 4

    def paired(values: np.ndarray) -> Estimate:
        return paired_interval(values, np.zeros(count), draws=2000)

    def changes(generator: np.random.Generator) -> np.ndarray:
        return generator.normal(0.5, 1.0, size=count)

    assert 0.92 < coverage(count, changes, 0.5, paired) < 0.98
    if count >= 10:  # of few prompts all may score the same
        assert 0.92 < coverage(count, means, 0.5, mean_interval) < 0.98
        assert 0.92 < coverage(count, means, 0.5, paired) < 0.98


def test_wilsons_intervals_hold_the_truth() -> None:
    """Exact coverage: the probability of each number of passes among 10 prompts, over a grid of rates."""
    intervals = [mean_interval(np.array([1.0] * passed + [0.0] * (10 - passed))) for passed in range(11)]
    covered = []
    for rate in np.linspace(0.01, 0.99, 99):
        chance = 0.0
        for passed, estimate in enumerate(intervals):
            assert estimate.low is not None and estimate.high is not None
            if estimate.low <= rate <= estimate.high:
                chance += math.comb(10, passed) * rate**passed * (1 - rate) ** (10 - passed)
        covered.append(chance)
    assert 0.94 < np.mean(covered) < 0.97
    assert min(covered) > 0.83
