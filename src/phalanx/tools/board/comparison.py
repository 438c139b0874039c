"""Runs beside each other: their names, their figures, and whether two validations differ by more than chance."""

import math
from collections.abc import Sequence
from datetime import timedelta
from html import escape
from statistics import median
from typing import Any, NamedTuple

from phalanx.config.load import flat
from phalanx.config.messages import cut
from phalanx.run.telemetry.run_folder import Run
from phalanx.telemetry.loggers import LOSS

TIME = "time"
MOST_NAMED = 3  # settings in the name of a run
MOST_SETTING = 24  # characters of a setting's value in it
SEED = "trainer.seed"


class Bounds(NamedTuple):
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def validation_bounds(run: Run, name: str, step: int) -> Bounds | None:
    """The mean reward on a validation set at a step; None if the run logged no interval, as for a single prompt."""
    key = f"val/{name}/reward"
    value, half, low = (dict(run.points(f"{key}/{end}")).get(step) for end in ("mean", "ci95", "ci95_low"))
    if value is None or half is None:
        return None
    low = value - half if low is None else low  # runs of earlier versions have none
    return Bounds(value, low, low + 2 * half)


def difference_of(after: Bounds, before: Bounds) -> Bounds:
    """The difference of two means and its interval, from those of the means, as if they were independent: Zou and
    Donner's MOVER. Two validations share their prompts, so their difference is at least this certain.
    """
    value = after.value - before.value
    low = value - math.hypot(after.value - after.low, before.high - before.value)
    return Bounds(value, low, value + math.hypot(after.high - after.value, before.value - before.low))


def verdict(difference: Bounds) -> str:
    """`better`, `worse`, or `tie` if the interval contains 0. The first two are classes of page/report.css."""
    return "better" if difference.low > 0 else "worse" if difference.high < 0 else "tie"


def differing_settings(configs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The settings whose values differ, with the value of each run; "-" for one that has none."""
    settings, differing = list(map(flat, configs)), dict[str, list[str]]()
    for key in dict.fromkeys(key for setting in settings for key in setting):
        values = [setting.get(key, "-") for setting in settings]
        if len(set(values)) > 1:
            differing[key] = values
    return differing


def telling_settings(configs: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """The settings that differ, without those of the trainer but its seed: they say where files go, and how often."""
    differing = differing_settings(configs)
    return {key: values for key, values in differing.items() if key == SEED or not key.startswith("trainer.")}


def labels_of(configs: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """The names of runs: the settings by which they differ, such as `lr=0.001`, if these are few; else `names`, those
    of their folders.
    """
    differing = telling_settings(configs)
    if not all(configs) or not 0 < len(differing) <= MOST_NAMED:
        return list(names)
    shorts = [key.rpartition(".")[2] for key in differing]
    labels = []
    for place, name in enumerate(names):
        parts = []
        for short, (key, values) in zip(shorts, differing.items(), strict=True):
            if values[place] != "-":
                parts.append(f"{short if shorts.count(short) == 1 else key}={cut(values[place], MOST_SETTING)}")
        labels.append((", ".join(parts) or name, name))
    alike = [label for label, _ in labels]
    return [label if alike.count(label) == 1 else f"{label} ({name})" for label, name in labels]


def comparison_table(runs: Sequence[Run]) -> str:
    """A table of each run's first, last and best validation, reward or loss, steps, time, throughput and memory."""
    figures = [figures_of(run) for run in runs]
    columns = list(dict.fromkeys(name for row in figures for name in row))
    html = "<section><div class='scroll comparison stack'><table><thead><tr><th scope=col>run</th>"
    for name in columns:
        html += f"<th scope=col>{escape(name)}</th>"
    html += "</tr></thead><tbody>"
    for run, row in zip(runs, figures, strict=True):
        html += f"<tr><th scope=row>{escape(run.label)}</th>"
        for name in columns:
            first = None if row is figures[0] else figures[0].get(name)
            cell = _figure_cell(name, row.get(name), first, _difference(run, runs[0], name))
            html += f'<td data-name="{escape(name)}"><span>{cell}</span></td>'
        html += "</tr>"
    note = (
        f"Small figures are differences to {runs[0].label}; those of validations are coloured beyond their 95 % "
        "interval, and a tie within. Throughput is the median over the steps."
    )
    return f"{html}</tbody></table></div><p class=n>{escape(note)}</p></section>"


def figures_of(run: Run) -> dict[str, float]:
    """The figures of a run by column name, without those that it has not logged."""
    figures: dict[str, float] = {}
    for name, points in run.validations().items():
        figures[f"{name} first"], figures[f"{name} last"] = points[0][1], points[-1][1]
        figures[f"{name} best"] = max(points.values)
    for key in run.metrics():
        if run.values(key) and (key == "reward/mean" or LOSS.fullmatch(key)):
            figures["training reward" if key == "reward/mean" else key] = run.values(key)[-1]
    figures["steps"] = run.last_step()
    seconds = run.wall_seconds()
    if seconds is not None:
        figures[TIME] = seconds
    for noun in ("images", "samples", "tokens"):
        rates = run.values(f"perf/{noun}_per_gpu_per_s")
        if rates:
            figures[f"{noun}/s per rank"] = median(rates)
    memory = run.values("perf/peak_memory_gb")
    if memory:
        figures["memory (GB)"] = max(memory)
    return figures


def _difference(run: Run, other: Run, column: str) -> Bounds | None:
    """The difference of two runs in a column of first or last validations, if both have its interval. The best of
    several validations has none.
    """
    name, _, which = column.rpartition(" ")
    if which not in ("first", "last") or run is other:
        return None
    ends = []
    for each in (run, other):
        points = each.validations().get(name)
        ends.append(validation_bounds(each, name, points[0 if which == "first" else -1][0]) if points else None)
    after, before = ends
    return None if after is None or before is None else difference_of(after, before)


def _figure_cell(name: str, value: float | None, first: float | None, difference: Bounds | None) -> str:
    """A figure and its difference to that of the first run."""
    if value is None:
        return "-"
    text = str(timedelta(seconds=round(value))) if name == TIME else f"{value:.4g}"
    if first is None:
        return text
    change = value - first
    shown = f"{change:+.3g}"
    if name == TIME:
        shown = f"{'-' if change < 0 else '+'}{timedelta(seconds=round(abs(change)))}"
    kind = "" if difference is None else verdict(difference)
    return f'{text} <small class="{kind}">{shown}{" tie" if kind == "tie" else ""}</small>'
