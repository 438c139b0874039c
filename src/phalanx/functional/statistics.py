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
_LEVEL = (1 + CONFIDENCE) / 2  # of the quantiles on either side
SKEWED = (0.2, 0.4)  # skewness from which a mean may lack its rarer prompts, and from which it is taken to
RARE = (0.5, 0.7)  # the same of a difference
SKEWED_CHANGES = (0.1, 0.2)  # skewness from which few changes make up a difference, and from which only they do
RELIEF = 0.16  # of the quantile of the bound on the other side, as the further one then leaves nearly nothing
_STEPS = 40  # of a bisection, to 1e-12
_TINY = 1e-12  # variances below are rounding errors
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
            for ties, ways in enumerate(_count_ways(others, len(silent), votes, k - votes)):
                chance += math.comb(len(given), votes) * ways / total / (ties + 1)
        expected += chance * (sum(given) / len(given))
    return expected


@lru_cache(maxsize=2**14)  # group sizes repeat across prompts
def _count_ways(others: tuple[int, ...], silent: int, most: int, left: int) -> list[int]:
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


def in_unit_range(samples: Values) -> bool:
    """Whether scores are known to be in 0..1: all samples are, and some are 0 or 1. NaN is ignored."""
    known = samples[~np.isnan(samples)]
    return bool(((known >= 0) & (known <= 1)).all() and ((known == 0) | (known == 1)).any())


def mean_interval(values: Values, others: Values | None = None, *, unit: bool | None = None) -> Estimate:
    """The mean of values [P], one per prompt, or of values - others [P] of the same prompts, and its interval:
    `mean_bounds` or `difference_bounds` if the scores are in 0..1 (`unit`; None: if the values show it), otherwise
    Student's t.
    """
    count, shown = len(values), values if others is None else np.concatenate([values, others])
    differences = values if others is None else values - others
    mean = float(differences.mean())
    known = in_unit_range(shown) if unit is None else unit
    if count < 2:
        return Estimate(mean, (0.0 if others is None else -1.0) if known else None, 1.0 if known else None, count)
    low, high = _bounds(values, others, known, np.array(t_quantile(_LEVEL, count - 1)), RELIEF)
    return Estimate(mean, float(low), float(high), count)


def _bounds(
    values: Values, others: Values | None, unit: bool, quantile: Values, relief: float
) -> tuple[Values, Values]:
    """The bounds [...] of the mean of values [..., P], or of values - others, with quantiles [...] of Student's t."""
    if unit:
        return mean_bounds(values, quantile, relief) if others is None else difference_bounds(values, others, quantile)
    differences = values if others is None else values - others
    mean, half_width = differences.mean(-1), quantile * np.sqrt(differences.var(-1, ddof=1) / values.shape[-1])
    return mean - half_width, mean + half_width


def t_half_width(values: Values) -> float | None:
    """Half the width of Student's t interval of the mean of values [P]; None for a single value."""
    high, mean = mean_interval(values, unit=False).high, float(values.mean())
    return None if high is None else high - mean


def mean_bounds(values: Values, quantile: float | Values, relief: float = RELIEF) -> tuple[Values, Values]:
    """The bounds [...] of the mean of scores in 0..1, values [..., P] with P > 1: Wilson's (1927) with a quantile of
    Student's t and the effective number of independent zeros and ones, m (1 - m) / s^2, where s^2 is the variance of
    the mean m. If all prompts score the same, this number is P.

    A mean near 0 of few prompts may lack the rare prompts that are easy (near 1 those that are hard), which its
    variance does not show. Its bound towards 1/2 is then that of prompts which score 0 or 1 throughout, and the
    quantile of the other bound is smaller, by up to the share `relief`.
    """
    count, mean, variance = values.shape[-1], values.mean(-1), values.var(-1, ddof=1)
    most = mean * (1 - mean)  # the variance of such prompts
    added = _skewness_weight(mean, count) * np.maximum(most - variance, 0)
    nearer = 1 - relief * np.divide(added, most, out=np.zeros_like(most), where=most > _TINY)
    low, high = _wilson_interval(mean, _effective_count(most, variance, count), quantile * nearer)
    further_low, further_high = _wilson_interval(mean, _effective_count(most, variance + added, count), quantile)
    low = np.where(mean > 0.5, np.minimum(low, further_low), low)
    high = np.where(mean < 0.5, np.maximum(high, further_high), high)
    # exact bounds if all are 0 or all are 1, since a rounding error would print as -0.0
    return np.where(mean <= 0, 0.0, np.maximum(low, 0.0)), np.where(mean >= 1, 1.0, np.minimum(high, 1.0))


def difference_bounds(values: Values, others: Values, quantile: float | Values) -> tuple[Values, Values]:
    """The bounds [...] of the mean of values - others [..., P], P > 1, of scores in 0..1: Tango's score interval of
    paired proportions (Statistics in Medicine 17, 1998) with a quantile of Student's t and an effective number of
    pairs: with u and d the mean rise and fall, (u + d - (u - d)^2) / s^2; P if no prompt differs.

    Few changed prompts may lack the rare ones that change much, so s^2 grows towards that of changes by 1, by as much
    as the prompts themselves score 0 or 1 throughout, or may. If a few large changes make the mean skewed, the bounds
    extend to those of changes by 0 or +-a, with a = mean |d|^3 / mean d^2, of the same mean and square.
    """
    count, differences = values.shape[-1], values - others
    up, down = np.maximum(differences, 0).mean(-1), np.maximum(-differences, 0).mean(-1)
    most, variance = up + down - (up - down) ** 2, differences.var(-1, ddof=1)
    split = np.zeros_like(most)
    for scores in (values, others):
        mean = scores.mean(-1)
        of_marks = mean * (1 - mean)
        share = np.divide(scores.var(-1), of_marks, out=np.ones_like(mean), where=of_marks > _TINY)
        split = np.maximum(split, np.maximum(share, _skewness_weight(mean, count)))
    rare = _relative_position(1 / np.sqrt(np.maximum(count * (up + down), _TINY)), RARE)
    number = _effective_count(most, variance + rare * split * np.maximum(most - variance, 0), count)
    low, high = _tango_bound(up, down, number, quantile), -_tango_bound(down, up, number, quantile)
    squares, central = (differences**2).mean(-1), differences - differences.mean(-1)[..., None]
    of_mean = np.sqrt(count * (central**2).mean(-1) ** 3)
    skewness = np.divide((central**3).mean(-1), of_mean, out=np.zeros_like(most), where=of_mean > _TINY)
    jump = np.divide((abs(differences) ** 3).mean(-1), squares, out=np.ones_like(most), where=squares > _TINY)
    changed = np.minimum(squares / jump**2, 1.0)
    moved, every = np.clip(differences.mean(-1) / jump, -changed, changed), np.full_like(most, count)
    up, down, share = (changed + moved) / 2, (changed - moved) / 2, _relative_position(np.abs(skewness), SKEWED_CHANGES)
    low -= share * np.maximum(low - jump * _tango_bound(up, down, every, quantile), 0)
    high += share * np.maximum(-jump * _tango_bound(down, up, every, quantile) - high, 0)
    return low, high


def _skewness_weight(mean: Values, count: int) -> Values:
    """0 to 1: how likely rare prompts are to be missing, by the skewness of the mean of `count` zeros and ones."""
    return _relative_position(np.abs(1 - 2 * mean) / np.sqrt(np.maximum(count * mean * (1 - mean), _TINY)), SKEWED)


def _relative_position(values: Values, ends: tuple[float, float]) -> Values:
    return np.clip((values - ends[0]) / (ends[1] - ends[0]), 0.0, 1.0)


def _effective_count(most: Values, variance: Values, count: int) -> Values:
    """The number of prompts with the variance `most` whose mean varies as much as that of `count` with `variance`."""
    whole = np.full_like(most, float(count))
    return np.divide(count * most, variance, out=whole, where=(variance > _TINY) & (most > _TINY))


def _wilson_interval(mean: Values, number: Values, z: float | Values) -> tuple[Values, Values]:
    centre = (mean + z * z / (2 * number)) / (1 + z * z / number)
    half = z / (1 + z * z / number) * np.sqrt(mean * (1 - mean) / number + z * z / (4 * number * number))
    return centre - half, centre + half


def _tango_bound(up: Values, down: Values, number: Values, z: float | Values) -> Values:
    """The lower bound of up - down, the shares of pairs that rise and that fall, by bisection: the smallest difference
    that is at most z standard errors away, where the share that falls is the most likely one for this difference.
    """
    low, high = np.full_like(up, -1.0), up - down
    for _ in range(_STEPS):
        middle = (low + high) / 2
        b = (2 - up + down) * middle - up - down
        falling = (np.sqrt(np.maximum(b * b + 8 * down * middle * (1 - middle), 0)) - b) / 4
        variance = np.maximum(2 * falling + middle * (1 - middle), 0) / number
        outside = (up - down - middle) ** 2 > z * z * variance
        low, high = np.where(outside, middle, low), np.where(outside, high, middle)
    return low


Group = Values | tuple[Values, Values]


def mean_of_groups(groups: Sequence[Group], unit: bool) -> Estimate:
    """The unweighted mean of the groups' means of values [P], or of pairs' differences [P], in 0..1 (`unit`) or not,
    and `group_bounds`; None if a group has one prompt.
    """
    means, counts = list[float](), list[int]()
    for group in groups:
        differences = group[0] - group[1] if isinstance(group, tuple) else group
        means.append(float(differences.mean()))
        counts.append(len(differences))
    if min(counts) < 2:
        return Estimate(float(np.mean(means)), None, None, sum(counts))
    low, high = group_bounds(groups, unit)
    return Estimate(float(np.mean(means)), float(low), float(high), sum(counts))


def group_bounds(groups: Sequence[Group], unit: bool) -> tuple[Values, Values]:
    """The bounds [...] of the unweighted mean of the groups' means of values [..., P], P > 1, or of pairs' differences.

    The distance of each bound from the mean combines the groups' distances in quadrature (MOVER; Zou and Donner,
    Statistics in Medicine 27, 2008), which keeps asymmetric intervals so. The degrees of freedom of Student's t are
    those of the mean (Welch 1947). In 0..1 the bounds extend to those of all prompts together, since a group without a
    success, whose bound is 0, hides how far the others are from theirs.
    """
    number, count = len(groups), 0
    mean = up = down = variance = squares = below = above = np.zeros(())
    pairs = list[tuple[Values, Values | None, Values]]()
    for group in groups:
        values, others = group if isinstance(group, tuple) else (group, None)
        differences = values if others is None else values - others
        pairs.append((values, others, differences))
        size, error = values.shape[-1], differences.var(-1, ddof=1) / values.shape[-1]
        count, variance, squares = count + size, variance + error, squares + error**2 / (size - 1)
        mean = mean + differences.mean(-1) / number
        up = up + np.maximum(differences, 0).mean(-1) / number
        down = down + np.maximum(-differences, 0).mean(-1) / number
    degrees = np.divide(variance**2, squares, out=np.full_like(variance, count - number), where=squares > _TINY**2)
    quantile = t_quantiles(_LEVEL, degrees)
    for values, others, differences in pairs:  # bounds on the further side do not all err in the same direction
        low, high = _bounds(values, others, unit, quantile, 0.0)
        below = below + (differences.mean(-1) - low) ** 2
        above = above + (high - differences.mean(-1)) ** 2
    low, high = mean - np.sqrt(below) / number, mean + np.sqrt(above) / number
    if unit:
        together = t_quantile(_LEVEL, count - number)
        effective = _effective_count(up + down - (up - down) ** 2, variance / number**2 * count, count)
        if pairs[0][1] is None:
            least, most = _wilson_interval(up, effective, together)
        else:
            least, most = _tango_bound(up, down, effective, together), -_tango_bound(down, up, effective, together)
        low, high = np.minimum(low, least), np.maximum(high, most)
        floor = 0.0 if pairs[0][1] is None else -1.0
        low, high = np.maximum(low, floor), np.minimum(high, 1.0)
    return low, high


def t_quantiles(probability: float, degrees: Values) -> Values:
    """`t_quantile` of degrees of freedom [...], of which only the integer part counts."""
    known, places = np.unique(degrees.astype(np.int64), return_inverse=True)
    return np.array([t_quantile(probability, int(each)) for each in known])[places].reshape(degrees.shape)


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
