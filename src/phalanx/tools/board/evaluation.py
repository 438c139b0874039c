"""The statistics of an evaluation: evaluation.json, from the rows of records.jsonl."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.functional.statistics import (
    CONFIDENCE,
    best_of_k,
    in_unit_range,
    majority_at_k,
    mean_interval,
    mean_of_groups,
    pass_at_k,
)
from phalanx.tools.board.evaluation_files import REWARD, Row
from phalanx.zoo.loggers.console import plain

STATISTICS = ("mean", "avg", "pass", "best", "majority")
CHANGED = 20  # number of prompts in the list of largest changes, half of them improvements
Figures = dict[str, dict[str, Any]]  # by score and statistic: the fields of an Estimate
# by (score, statistic): the value of each prompt, [P], or those of two models, [2, P]; NaN for a prompt without one
Statistics = dict[tuple[str, str], NDArray[np.float64]]


# -- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """The scores of a set of prompts: `values` maps names of scores to [P, n], with NaN for rewards that failed;
    `answers` maps names of rewards that extract answers to [P][n]; `rows` holds each prompt's first record.
    """

    rows: list[Row]
    values: dict[str, NDArray[np.float64]]
    answers: dict[str, list[list[str | None]]]

    @property
    def n(self) -> int:
        return self.values[REWARD].shape[1]

    def of(self, prompts: Sequence[int]) -> "Scores":
        """The scores of the prompts with these positions."""
        rows = [self.rows[i] for i in prompts]
        answers = {name: [given[i] for i in prompts] for name, given in self.answers.items()}
        return Scores(rows, {name: values[list(prompts)] for name, values in self.values.items()}, answers)


@dataclass(frozen=True)
class Wanted:
    """The statistics to compute: see phalanx.config.tasks.EvaluateConfig."""

    k: Sequence[int] | None = None
    threshold: float | None = None
    group_by: str | None = None

    def of(self, n: int) -> list[int]:
        """The values of k for n samples per prompt: those chosen, or by default the powers of 2 up to n."""
        if self.k is not None:
            return [k for k in self.k if k <= n]
        return [2**power for power in range(n.bit_length())]


def read_scores(rows: Sequence[Row]) -> dict[str, Scores]:
    """Group rows, in any order, into the scores of each set."""
    sets: dict[str, dict[int, dict[int, Row]]] = {}
    for row in rows:
        sets.setdefault(row["set"], {}).setdefault(row["index"], {})[row["sample"]] = row
    result = {}
    for name, prompts in sets.items():
        grid = [[samples[i] for i in sorted(samples)] for _, samples in sorted(prompts.items())]
        values: dict[str, Any] = {REWARD: [[row[REWARD] for row in line] for line in grid]}
        for term in grid[0][0]["scores"]:
            values[term] = [[row["scores"][term] for row in line] for line in grid]
        answers = {}
        for term in grid[0][0].get("answers", {}):
            answers[term] = [[row["answers"][term] for row in line] for line in grid]
        for term, of_term in values.items():
            values[term] = np.array(of_term, dtype=np.float64)  # None is NaN
        result[name] = Scores([line[0] for line in grid], values, answers)
    return result


def per_prompt(scores: Scores, wanted: Wanted) -> Statistics:
    """The statistics of each prompt; NaN for prompts with too few scored samples."""
    result: Statistics = {}
    for name, values in scores.values.items():
        statistics = {"mean": _each_prompt(values, 1, lambda row, _: float(row.mean()))}
        are_marks = bool(np.isin(values[~np.isnan(values)], (0.0, 1.0)).all())
        threshold = 1.0 if wanted.threshold is None and are_marks else wanted.threshold
        for k in wanted.of(scores.n):
            if threshold is not None:
                statistics[f"pass@{k}"] = _each_prompt(values, k, partial(_pass_rate, k=k, threshold=threshold))
            if k == 1:  # all other statistics equal the mean
                continue
            statistics[f"avg@{k}"] = _each_prompt(values[:, :k], k, lambda row, _: float(row.mean()))
            if not are_marks:  # for scores of 0 and 1, best@k equals pass@k
                statistics[f"best@{k}"] = _each_prompt(values, k, lambda row, _, k=k: best_of_k(row, k))
            if name in scores.answers:
                votes = partial(_majority_score, values=values, answers=scores.answers[name], k=k)
                statistics[f"majority@{k}"] = _each_prompt(values, k, votes)
        for statistic in sorted(statistics, key=_statistic_order):
            result[name, statistic] = statistics[statistic]
    return result


def _statistic_order(statistic: str) -> tuple[int, int]:
    """Sort key of statistics: by kind, then by k."""
    kind, _, k = statistic.partition("@")
    return STATISTICS.index(kind), int(k or 0)


def _each_prompt(values: NDArray[np.float64], least: int, statistic: Any) -> NDArray[np.float64]:
    """Apply `statistic(row, i)` to the scores of each prompt i that has at least `least` of them; others are NaN."""
    result = np.full(len(values), np.nan)
    for i, row in enumerate(values):
        known = row[~np.isnan(row)]
        if len(known) >= least:
            result[i] = statistic(known, i)
    return result


def _pass_rate(row: NDArray[np.float64], _: int, k: int, threshold: float) -> float:
    return pass_at_k(int((row >= threshold).sum()), len(row), k)


def _majority_score(
    row: NDArray[np.float64], i: int, values: NDArray[np.float64], answers: list[list[str | None]], k: int
) -> float:
    given = [answer for answer, value in zip(answers[i], values[i], strict=True) if not math.isnan(value)]
    return majority_at_k(given, row, k)


def _ranged_scores(scores: Scores) -> set[str]:
    """The scores that are known to be in 0..1."""
    return {name for name, values in scores.values.items() if in_unit_range(values)}


def _is_ranged(name: str, statistic: str, ranged: set[str]) -> bool:
    """Whether a statistic of a score is in 0..1: pass@k is, as a probability."""
    return name in ranged or statistic.startswith("pass")


def estimated_figures(statistics: Statistics, ranged: set[str]) -> Figures:
    """The estimates over all prompts that have a value, or of the paired differences of two models; `ranged` are the
    scores in 0..1.
    """
    result: Figures = {}
    for (name, statistic), values in statistics.items():
        of_score, known = result.setdefault(name, {}), _known_values(values)
        if known.size:
            unit = _is_ranged(name, statistic, ranged)
            of_score[statistic] = asdict(mean_interval(*known, unit=unit))
    return result


def _known_values(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values [1 or 2, K] of the K prompts that have all of them."""
    rows = np.atleast_2d(values)
    return rows[:, ~np.isnan(rows).any(0)]


def _paired_values(values: Statistics, before: Statistics) -> Statistics:
    """The values [2, P] of both models; a statistic that only one of them has is omitted."""
    return {key: np.stack([values[key], before[key]]) for key in values if key in before}


def _changed_most(rows: Sequence[Row], now: NDArray[np.float64], then: NDArray[np.float64]) -> list[dict[str, Any]]:
    """The prompts whose mean rewards [P] changed most: those that improved, then those that got worse."""
    order = [int(i) for i in np.argsort(np.nan_to_num(now - then), kind="stable") if abs(now[i] - then[i]) > 0]
    down = [i for i in order if now[i] < then[i]][: CHANGED // 2]
    up = [i for i in reversed(order) if now[i] > then[i]][: CHANGED // 2]
    changed = []
    for i in [*up, *down]:
        of_prompt = {"index": rows[i]["index"], "prompt": rows[i]["prompt"]}
        changed.append(of_prompt | {"before": float(then[i]), "now": float(now[i])})
    return changed


def _count_wins(changes: NDArray[np.float64]) -> tuple[int, int, int]:
    """How many values are better, equal and worse."""
    return int((changes > 0).sum()), int((changes == 0).sum()), int((changes < 0).sum())


def grouped_prompts(scores: Scores, column: str) -> dict[str, list[int]]:
    """Group the positions of prompts by the values of a data column, in numerical order if all are numbers."""
    groups: dict[str, list[int]] = {}
    numbers: dict[str, float] = {}
    for i, row in enumerate(scores.rows):
        value = row["columns"].get(column)
        groups.setdefault(str(value), []).append(i)
        if isinstance(value, int | float):
            numbers[str(value)] = value
    order = sorted(groups, key=numbers.__getitem__) if len(numbers) == len(groups) else sorted(groups)
    return {value: groups[value] for value in order}


# -- evaluation.json --------------------------------------------------------------------------------------------------


def result_of(
    rows: Sequence[Row], wanted: Wanted, facts: Mapping[str, Any], baseline: Sequence[Row] | None = None
) -> dict[str, Any]:
    """The content of evaluation.json: for each set the statistics, those of groups, and the differences to a baseline
    with the rows `baseline`.
    """
    others = None if baseline is None else read_scores(baseline)
    sets: dict[str, Any] = {}
    for name, scores in read_scores(rows).items():
        part: dict[str, Any] = {"prompts": len(scores.rows), "n": scores.n}
        ranged = _ranged_scores(scores)
        part["scores"] = estimated_figures(per_prompt(scores, wanted), ranged)
        groups = {} if wanted.group_by is None else grouped_prompts(scores, wanted.group_by)
        if groups:
            of_groups = {value: per_prompt(scores.of(places), wanted) for value, places in groups.items()}
            part["groups"] = {}
            for value, places in groups.items():
                part["groups"][value] = {"prompts": len(places), "scores": estimated_figures(of_groups[value], ranged)}
            part["mean_of_groups"] = {"scores": _mean_over_groups(list(of_groups.values()), ranged)}
        if others is not None:
            part["baseline"] = _compare_scores(scores, others[name], wanted, groups)
        sets[name] = part
    return {**facts, "confidence": CONFIDENCE, "sets": sets}


def _compare_scores(scores: Scores, others: Scores, wanted: Wanted, groups: Mapping[str, list[int]]) -> dict[str, Any]:
    values, before = per_prompt(scores, wanted), per_prompt(others, wanted)
    ranged = _ranged_scores(scores) & _ranged_scores(others)
    compared = estimated_figures(_paired_values(values, before), ranged)
    part: dict[str, Any] = {"scores": estimated_figures(before, _ranged_scores(others)), "differences": compared}
    wins = {}
    for name in compared:
        changes = values[name, "mean"] - before[name, "mean"]
        wins[name] = {
            "prompts": _count_wins(changes),
            "samples": _count_wins(scores.values[name] - others.values[name]),
        }
    part["better_equal_worse"] = wins
    part["changed_most"] = _changed_most(scores.rows, values[REWARD, "mean"], before[REWARD, "mean"])
    inner = []
    for value, places in groups.items():
        inner.append(_paired_values(per_prompt(scores.of(places), wanted), per_prompt(others.of(places), wanted)))
        part.setdefault("groups", {})[value] = {"differences": estimated_figures(inner[-1], ranged)}
    if inner:
        part["mean_of_groups"] = {"differences": _mean_over_groups(inner, ranged)}
    return part


def _mean_over_groups(groups: Sequence[Statistics], ranged: set[str]) -> Figures:
    """The mean over groups of each statistic that all of them have."""
    result: Figures = {}
    for name, statistic in groups[0]:
        of_score, parts = result.setdefault(name, {}), list[Any]()
        for group in groups:
            known = _known_values(group.get((name, statistic), np.array([])))
            if known.size:
                parts.append(known[0] if len(known) == 1 else (known[0], known[1]))
        if len(parts) == len(groups):
            of_score[statistic] = asdict(mean_of_groups(parts, _is_ranged(name, statistic, ranged)))
    return result


# -- the console ------------------------------------------------------------------------------------------------------


def shown_scores(scores: Mapping[str, Any]) -> list[str]:
    """The scores that a table shows; if there is one term and it equals the reward, the reward is omitted."""
    terms = [name for name in scores if name != REWARD]
    if len(terms) == 1 and REWARD in scores and scores[terms[0]].get("mean") == scores[REWARD].get("mean"):
        return terms
    return list(scores)


def interval_text(estimate: Mapping[str, Any]) -> str:
    """Format an estimate as `0.7500 [0.5310, 0.8880]`."""
    if estimate["low"] is None:
        return f"{estimate['value']:.4f}"
    return f"{estimate['value']:.4f} [{estimate['low']:.4f}, {estimate['high']:.4f}]"


def groups_of(part: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any] | None]]:
    """Table rows for the groups and their mean: (label, scores, differences)."""
    compared, shown = part.get("baseline", {}), []
    for value, group in part.get("groups", {}).items():
        inner = compared.get("groups", {}).get(value, {}).get("differences")
        shown.append((f"{value} ({group['prompts']} prompts)", group["scores"], inner))
    if len(shown) > 1:
        over = part["mean_of_groups"]["scores"]
        shown.append((f"mean of {len(shown)} groups", over, compared.get("mean_of_groups", {}).get("differences")))
    return shown


def table(result: Mapping[str, Any]) -> str:
    """Format the statistics for the console."""
    lines = []
    for name, part in result["sets"].items():
        lines.append(f"{name}: {part['prompts']} prompts x {part['n']}, 95 % intervals over prompts")
        rows = [["", "", "value", *(["difference"] if "baseline" in part else [])]]
        rows += _table_rows(part["scores"], part.get("baseline", {}).get("differences"), "")
        for label, group, inner in groups_of(part):
            only = {score: {"mean": row["mean"]} for score, row in group.items() if "mean" in row}
            rows += _table_rows(only, inner, f"{plain(' '.join(label.split()))} ")
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for row in rows:
            lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if "baseline" in part:
            better, equal, worse = part["baseline"]["better_equal_worse"][REWARD]["prompts"]
            lines.append(f"  prompts: {better} better, {equal} equal, {worse} worse than the baseline")
    return "\n".join(lines)


def _table_rows(scores: Mapping[str, Any], differences: Mapping[str, Any] | None, prefix: str) -> list[list[str]]:
    rows = []
    for name in shown_scores(scores):
        for statistic, estimate in scores[name].items():
            row = [f"{prefix}{name}", statistic, interval_text(estimate)]
            if differences is not None:
                other = differences.get(name, {}).get(statistic)
                row.append("" if other is None else interval_text(other))
            rows.append(row)
    return rows
