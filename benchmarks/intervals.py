"""How often do the 95 % intervals of `phalanx evaluate` contain the truth? Simulated coverage.

Prompts have a difficulty, the probability that a sample passes, drawn from one of several distributions with a known
mean; each prompt has n samples. A cell is a statistic, a number of prompts, n, a mean and a distribution, and its
coverage is the share of evaluations whose interval contains the true value over all prompts. Printed for each statistic
and number of prompts: the lowest and highest coverage and how many cells are below, within and above 93 to 97 %.

    python benchmarks/intervals.py           # about an hour on one core; the table of docs/evaluation.md
    python benchmarks/intervals.py --statistics difference --prompts 100   # a part of it
    python benchmarks/intervals.py --cells   # every cell outside 93 to 97 %
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.functional.statistics import difference_bounds, group_bounds, mean_bounds, pass_at_k, t_quantile

Values = NDArray[np.float64]
Draw = Callable[[np.random.Generator, float, tuple[int, ...]], Values]
PROMPTS = (10, 30, 100, 500)
SAMPLES = (1, 4, 16, 64)
MEANS = (0.02, 0.05, 0.1, 0.3, 0.5, 0.8, 0.98)
# k of pass@k, numbers of samples, and the largest mean, above which pass@k of equal prompts is beyond 0.98
PASSES = ((2, (2, 16), 0.8), (4, (4, 64), 0.5), (16, (16, 64), 0.1))
STATISTICS = ("mean", "pass@2", "pass@4", "pass@16", "difference", "mean of groups", "difference of groups")
RIGHT = (0.93, 0.97)
FLIPS = 0.03  # samples of a greedy model that differ from the others
GROUPS = (0.6, 1.0, 1.4)  # means of three groups, relative to that of all
LARGE = 1_000_000  # draws for the true value


def equal(generator: np.random.Generator, mean: float, shape: tuple[int, ...]) -> Values:
    return np.full(shape, mean)


def all_or_nothing(generator: np.random.Generator, mean: float, shape: tuple[int, ...]) -> Values:
    return (generator.random(shape) < mean).astype(np.float64)


def greedy(generator: np.random.Generator, mean: float, shape: tuple[int, ...]) -> Values:
    """Prompts are solved or not, and FLIPS of the samples differ, or fewer if the mean is nearer to an end."""
    flips = min(FLIPS, mean / 2, (1 - mean) / 2)
    return np.where(generator.random(shape) < (mean - flips) / (1 - 2 * flips), 1 - flips, flips)


def beta(concentration: float) -> Draw:
    def draw(generator: np.random.Generator, mean: float, shape: tuple[int, ...]) -> Values:
        return generator.beta(mean * concentration, (1 - mean) * concentration, shape)

    return draw


DIFFICULTIES: dict[str, Draw] = {
    "equal": equal,
    "all or nothing": all_or_nothing,
    "greedy": greedy,
    "Beta, a+b=0.2": beta(0.2),
    "Beta, a+b=1": beta(1),
    "Beta, a+b=5": beta(5),
    "Beta, a+b=30": beta(30),
}
PAIRED = ("equal", "greedy", "Beta, a+b=0.2", "Beta, a+b=5")


def changed(generator: np.random.Generator, kind: str, draw: Draw, mean: float, before: Values) -> Values:
    """The difficulties of another model on the same prompts."""
    if kind == "the same":
        return before
    if kind == "drawn anew":
        return draw(generator, mean, before.shape)
    if kind == "odds x 1.6":
        return 1.6 * before / (1 + 0.6 * before)
    few = generator.random(before.shape) < (0.1 if kind == "10 % anew" else 0.05)
    others = draw(generator, mean, before.shape) if kind == "10 % anew" else np.maximum(before, 1 - before)
    return np.where(few, others, before)


CHANGES = ("the same", "drawn anew", "10 % anew", "5 % solved", "odds x 1.6")


@dataclass(frozen=True)
class Cell:
    """A simulated kind of evaluation. change: that of the second model, for paired differences."""

    statistic: str
    prompts: int
    n: int
    mean: float
    difficulty: str
    change: str = ""


def cells(prompts: tuple[int, ...] = PROMPTS) -> Iterator[Cell]:
    """All cells; with one sample per prompt, only the mean of the difficulties counts."""
    for count in prompts:
        for mean in MEANS:
            for name in DIFFICULTIES:
                for n in SAMPLES:
                    if n > 1 or name == "equal":
                        yield Cell("mean", count, n, mean, name)
                for k, samples, most in PASSES:
                    for n in samples if mean <= most else ():
                        yield Cell(f"pass@{k}", count, n, mean, name)
            for name in PAIRED:
                for n in (1, 8, 64):
                    for change in CHANGES:
                        if mean != 0.1:
                            yield Cell("difference", count, n, mean, name, change)
            for name in DIFFICULTIES:
                for n in SAMPLES:
                    if n > 1 or name == "equal":
                        yield Cell("mean of groups", count, n, mean, name)
            for name in PAIRED:
                for n in (1, 8, 64):
                    for change in CHANGES:
                        if mean in (0.02, 0.3, 0.5, 0.8):
                            yield Cell("difference of groups", count, n, mean, name, change)


def coverage(cell: Cell, times: int, seed: int = 0) -> float:
    """The share of `times` simulated evaluations whose interval contains the true value."""
    generator, draw = np.random.default_rng(seed), DIFFICULTIES[cell.difficulty]
    shape, quantile = (times, cell.prompts), t_quantile(0.975, cell.prompts - 1)
    if cell.statistic.endswith("of groups"):
        return _coverage_of_groups(cell, times, generator)
    first = draw(generator, cell.mean, shape)
    values = generator.binomial(cell.n, first) / cell.n
    if cell.statistic == "difference":
        now = generator.binomial(cell.n, changed(generator, cell.change, draw, cell.mean, first)) / cell.n
        low, high = difference_bounds(now, values, quantile)
        truth = _change(cell, cell.mean, generator)
    elif cell.statistic.startswith("pass@"):
        k = int(cell.statistic.removeprefix("pass@"))
        table = np.array([pass_at_k(passed, cell.n, k) for passed in range(cell.n + 1)])
        low, high = mean_bounds(table[np.rint(values * cell.n).astype(int)], quantile)
        truth = float((1 - (1 - draw(generator, cell.mean, (LARGE,))) ** k).mean())
    else:
        low, high = mean_bounds(values, quantile)
        truth = cell.mean
    assert (low >= (-1 if cell.statistic == "difference" else 0)).all() and (high <= 1).all()
    return float(((low <= truth + 1e-9) & (truth - 1e-9 <= high)).mean())


def _coverage_of_groups(cell: Cell, times: int, generator: np.random.Generator) -> float:
    draw, truths = DIFFICULTIES[cell.difficulty], list[float]()
    parts = np.array_split(np.arange(cell.prompts), len(GROUPS))
    groups: list[Values | tuple[Values, Values]] = []
    for factor, part in zip(GROUPS, parts, strict=True):
        mean = min(cell.mean * factor, 0.98)
        first = draw(generator, mean, (times, len(part)))
        values = generator.binomial(cell.n, first) / cell.n
        if cell.change:
            now = changed(generator, cell.change, draw, mean, first)
            groups.append((generator.binomial(cell.n, now) / cell.n, values))
            truths.append(_change(cell, mean, generator))
        else:
            groups.append(values)
            truths.append(mean)
    low, high = group_bounds(groups, unit=True)
    truth = float(np.mean(truths))
    assert (low >= -bool(cell.change)).all() and (high <= 1).all()
    return float(((low <= truth + 1e-9) & (truth - 1e-9 <= high)).mean())


def _change(cell: Cell, mean: float, generator: np.random.Generator) -> float:
    """The true difference between the models over all prompts."""
    if cell.change not in ("5 % solved", "odds x 1.6"):
        return 0.0
    draw = DIFFICULTIES[cell.difficulty]
    large = draw(generator, mean, (LARGE,))
    return float((changed(generator, cell.change, draw, mean, large) - large).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", action="store_true", help="print every cell outside 93 to 97 %%")
    parser.add_argument("--times", type=int, default=4000, help="simulated evaluations per cell")
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--statistics", nargs="*", default=STATISTICS, choices=STATISTICS)
    arguments = parser.parse_args()
    found: dict[tuple[str, int], list[float]] = {}
    for cell in cells(tuple(arguments.prompts)):
        if cell.statistic not in arguments.statistics:
            continue
        fewer = 4 if cell.prompts == 500 else 2 if "groups" in cell.statistic else 1
        times = arguments.times // fewer
        value = coverage(cell, times)
        found.setdefault((cell.statistic, cell.prompts), []).append(value)
        if arguments.cells and not RIGHT[0] <= value <= RIGHT[1]:
            print(f"{100 * value:5.1f} %  {cell}", flush=True)
    print("| statistic | prompts | cells | lowest | highest | below 93 % | 93 to 97 % | above 97 % |")
    print("|---|---|---|---|---|---|---|---|")
    for (statistic, prompts), values in found.items():
        below, above = sum(value < RIGHT[0] for value in values), sum(value > RIGHT[1] for value in values)
        ends = f"{100 * min(values):.1f} % | {100 * max(values):.1f} %"
        print(
            f"| {statistic} | {prompts} | {len(values)} | {ends} | {below} | {len(values) - below - above} | {above} |"
        )


if __name__ == "__main__":
    main()
