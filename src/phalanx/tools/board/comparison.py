"""The table at the top of a comparison page: one row per run, with differences to the first run."""

from collections.abc import Sequence
from datetime import timedelta
from html import escape
from statistics import median

from phalanx.run.telemetry.run_folder import Run
from phalanx.telemetry.loggers import LOSS

TIME = "time"


def comparison_table(runs: Sequence[Run]) -> str:
    """A table of each run's first, last and best validation, reward or loss, steps, time, throughput and memory."""
    figures = [figures_of(run) for run in runs]
    columns = list(dict.fromkeys(name for row in figures for name in row))
    html = "<section><div class='scroll comparison'><table><thead><tr><th scope=col>run</th>"
    for name in columns:
        html += f"<th scope=col>{escape(name)}</th>"
    html += "</tr></thead><tbody>"
    for run, row in zip(runs, figures, strict=True):
        html += f"<tr><th scope=row>{escape(run.label)}</th>"
        for name in columns:
            html += f"<td>{_figure_cell(name, row.get(name), None if row is figures[0] else figures[0].get(name))}</td>"
        html += "</tr>"
    note = f"Small figures are differences to {runs[0].label}. Throughput is the median over the steps."
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


def _figure_cell(name: str, value: float | None, first: float | None) -> str:
    """A figure and its difference to that of the first run."""
    if value is None:
        return "-"
    text = str(timedelta(seconds=round(value))) if name == TIME else f"{value:.4g}"
    if first is None:
        return text
    change = value - first
    if name == TIME:
        difference = f"{'-' if change < 0 else '+'}{timedelta(seconds=round(abs(change)))}"
    else:
        difference = f"{change:+.3g}"
    return f"{text} <small>{difference}</small>"
