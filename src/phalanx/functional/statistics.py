"""Statistics of scores: estimates from n samples per prompt, and confidence intervals over prompts, with numpy only.

The estimates are unbiased: each is the mean over all choices of k of the n samples. Intervals are over prompts instead
of samples, since the samples of a prompt are not independent.
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
FEW = 10  # with fewer prompts, the interval of a bootstrap is too narrow
SEED = 0  # of the bootstrap, so that intervals are reproducible
_AT_ONCE = 2**20  # random numbers in memory at a time
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean over `count` prompts and its confidence interval; the bounds are None if they cannot be estimated."""

    value: float
    low: float | None
    high: float | None
    count: int


# -- estimates from a prompt's samples --------------------------------------------------------------------------------


def pass_at_k(passed: int, n: int, k: int) -> float:
    """The probability that at least one of k samples passes, given n samples of which c = `passed` do:
    1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def best_of_k(scores: Values, k: int) -> float:
    """The expected maximum of k of the scores [n]: the i-th smallest (from 0) is the maximum in C(i, k - 1) of C(n, k)
    choices.
    """
    n = len(scores)
    weights = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    return float(weights @ np.sort(scores))


def majority_at_k(answers: Sequence[Hashable | None], scores: Values, k: int) -> float:
    """The expected score of the most frequent answer among k of the n samples; ties are broken at random.

    The score of an answer is the mean of the `scores` [n] of the samples that give it. Samples without an answer (None)
    do not vote; if none of the k samples votes, the score is the mean of theirs.
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


@lru_cache(maxsize=2**14)  # group sizes repeat across prompts
def _ways(others: tuple[int, ...], silent: int, most: int, left: int) -> list[int]:
    """The number of ways to choose `left` samples from groups of the sizes `others`, at most `most` from each, and from
    the `silent` samples; by the number of groups from which `most` are chosen.
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


# -- intervals over prompts -------------------------------------------------------------------------------------------


def mean_interval(values: Values, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of values [P], one per prompt, and its interval: Student's t, or for only zeros and ones Wilson's (1927;
    Brown, Cai and DasGupta, Statistical Science 16, 2001), since t is too narrow for means near 0 and 1.
    """
    count, mean = len(values), float(values.mean())
    if np.isin(values, (0.0, 1.0)).all():
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
        half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
        # exact bounds if all are 0 or all are 1, since a rounding error would print as -0.0
        return Estimate(mean, centre - half if mean > 0 else 0.0, centre + half if mean < 1 else 1.0, count)
    return _t_interval(values, confidence)


def _t_interval(values: Values, confidence: float) -> Estimate:
    mean, half_width = float(values.mean()), t_half_width(values, confidence)
    if half_width is None:
        return Estimate(mean, None, None, len(values))
    return Estimate(mean, mean - half_width, mean + half_width, len(values))


def t_half_width(values: Values, confidence: float = CONFIDENCE) -> float | None:
    """Half the width of Student's t interval of the mean of values [P]; None for a single value."""
    if len(values) < 2:
        return None
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    return t_quantile((1 + confidence) / 2, len(values) - 1) * error


def paired_interval(
    values: Values, others: Values, confidence: float = CONFIDENCE, seed: int = SEED, draws: int = DRAWS
) -> Estimate:
    """The mean of values - others [P] of the same prompts, and its interval.

    The interval has the percentiles of a bootstrap over prompts, moved outwards as Student's t is wider than the normal
    distribution (Hesterberg, arXiv 1411.5279, section 5.3), without which it is too narrow for few prompts. For fewer
    than FEW prompts it is Student's t interval: bootstrap means never leave the range of the differences, which with 2
    prompts contains the true mean only in half of the cases.
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
    """The unweighted mean of the groups' means. The distance of each bound from the mean combines the groups' distances
    in quadrature (MOVER; Zou and Donner, Statistics in Medicine 27, 2008), which keeps Wilson's intervals asymmetric.
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
    """Quantile of Student's t distribution: exact for 1 and 2 degrees of freedom, otherwise accurate to a thousandth
    (Abramowitz and Stegun, 26.7.5).
    """
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
