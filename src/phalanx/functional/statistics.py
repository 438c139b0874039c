"""Statistics of scores: estimates from n samples of each prompt, and their intervals over prompts. Only numpy.

The estimates are unbiased: each is the mean of what k samples give over all choices of k of the n. Prompts, and not
samples, are what an interval is over, since the samples of a prompt resemble one another.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
DRAWS = 10_000  # of a bootstrap
FEW = 10  # prompts, of which a bootstrap is too narrow
SEED = 0  # of its draws, so that an interval repeats
_AT_ONCE = 2**20  # numbers of the draws in memory
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` prompts and its interval; without bounds where one prompt tells nothing of others."""

    value: float
    low: float | None
    high: float | None
    count: int


# -- of a prompt's samples --------------------------------------------------------------------------------------------


def pass_at_k(passed: int, n: int, k: int) -> float:
    """The probability that one of k samples passes, of n of which `passed` do: 1 - C(n - c, k) / C(n, k), as in
    Chen et al., arXiv 2107.03374, equation 1.
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def best_of_k(scores: Values, k: int) -> float:
    """The expected largest of k of the scores [n]: the i-th smallest, from 0, is it in C(i, k - 1) of C(n, k) cases."""
    n = len(scores)
    weights = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    return float(weights @ np.sort(scores))


def majority_at_k(answers: Sequence[Hashable | None], scores: Values, k: int) -> float:
    """The expected score of the answer that most of k of the n samples give; ties are broken at random.

    `scores` [n]: the score of an answer is the mean of those of the samples that give it. Samples without an answer
    (None) do not vote; where none of the k votes, the score is the mean of theirs.
    """
    groups: dict[Hashable | None, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores.tolist(), strict=True):
        groups[answer].append(score)
    silent = groups.pop(None, [])
    total, expected = math.comb(len(scores), k), 0.0
    if len(silent) >= k:
        expected += math.comb(len(silent), k) / total * (sum(silent) / len(silent))
    for answer, given in groups.items():
        others = tuple(sorted(len(other) for name, other in groups.items() if name != answer))
        chance = 0.0
        for votes in range(1, min(len(given), k) + 1):
            for ties, ways in enumerate(_ways(others, len(silent), votes, k - votes)):
                chance += math.comb(len(given), votes) * ways / total / (ties + 1)
        expected += chance * (sum(given) / len(given))
    return expected


@lru_cache(maxsize=2**14)  # prompts have few different sizes of groups
def _ways(others: tuple[int, ...], silent: int, most: int, left: int) -> list[int]:
    """In how many ways the `left` samples come from groups of these sizes, at most `most` of each, and from those that
    are `silent`; by the number of groups with `most`.
    """
    ways = {(left, 0): 1}
    for size in others:
        further: dict[tuple[int, int], int] = defaultdict(int)
        for (rest, ties), count in ways.items():
            for votes in range(min(size, most, rest) + 1):
                further[rest - votes, ties + (votes == most)] += count * math.comb(size, votes)
        ways = further
    by_ties = [0] * (len(others) + 1)
    for (rest, ties), count in ways.items():
        by_ties[ties] += count * math.comb(silent, rest)
    return by_ties


# -- over prompts -----------------------------------------------------------------------------------------------------


def mean_interval(values: Values, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of values [P], one of each prompt, and its interval: Student's t, or where all are 0 or 1 Wilson's
    (1927; Brown, Cai and DasGupta, Statistical Science 16, 2001), which t would make too narrow near 0 and 1.
    """
    count, mean = len(values), float(values.mean())
    if np.isin(values, (0.0, 1.0)).all():
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
        half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
        # where all are 0, or all 1, the rounding error of a bound would show as -0.0
        return Estimate(mean, centre - half if mean > 0 else 0.0, centre + half if mean < 1 else 1.0, count)
    return _t_interval(values, confidence)


def _t_interval(values: Values, confidence: float) -> Estimate:
    mean, half_width = float(values.mean()), t_half_width(values, confidence)
    if half_width is None:
        return Estimate(mean, None, None, len(values))
    return Estimate(mean, mean - half_width, mean + half_width, len(values))


def t_half_width(values: Values, confidence: float = CONFIDENCE) -> float | None:
    """Half the width of Student's t interval of the mean of values [P]; None of a single one."""
    if len(values) < 2:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return t_quantile((1 + confidence) / 2, len(values) - 1) * error


def paired_interval(
    values: Values, others: Values, confidence: float = CONFIDENCE, seed: int = SEED, draws: int = DRAWS
) -> Estimate:
    """The mean of values - others [P], of the same prompts, and its interval: the percentiles of a bootstrap over
    prompts, taken as much further out as Student's t is wider than the normal distribution (Hesterberg, arXiv
    1411.5279, section 5.3), without which intervals of few prompts are too narrow. Of fewer than FEW prompts it is
    Student's t interval: no mean of a draw lies outside the differences, and with 2 prompts all of them hold the truth
    in half of the cases.
    """
    differences = values - others
    count, mean = len(differences), float(differences.mean())
    if count < FEW:
        return _t_interval(differences, confidence)
    generator, means = np.random.default_rng(seed), []
    for start in range(0, draws, max(_AT_ONCE // count, 1)):
        rows = min(max(_AT_ONCE // count, 1), draws - start)
        means.append(differences[generator.integers(count, size=(rows, count))].mean(1))
    further = math.sqrt(count / (count - 1)) * t_quantile((1 + confidence) / 2, count - 1)
    tail = NormalDist().cdf(-further)
    low, high = np.quantile(np.concatenate(means), (tail, 1 - tail))
    return Estimate(mean, float(low), float(high), count)


def mean_of_groups(groups: Sequence[Estimate]) -> Estimate:
    """The mean of the groups' means, each with the same weight, over all of their prompts. Each bound is as far from it
    as the groups' own are from theirs, in quadrature (MOVER; Zou and Donner, Statistics in Medicine 27, 2008), which
    keeps Wilson's intervals uneven.
    """
    value, count = sum(group.value for group in groups) / len(groups), sum(group.count for group in groups)
    below, above = 0.0, 0.0
    for group in groups:
        if group.low is None or group.high is None:
            return Estimate(value, None, None, count)
        below += (group.value - group.low) ** 2
        above += (group.high - group.value) ** 2
    return Estimate(value, value - math.sqrt(below) / len(groups), value + math.sqrt(above) / len(groups), count)


def t_quantile(probability: float, degrees: int) -> float:
    """Student's t: exact of 1 and 2 degrees of freedom, of more to a thousandth (Abramowitz and Stegun, 26.7.5)."""
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))
