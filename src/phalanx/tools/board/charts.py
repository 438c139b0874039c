"""The charts of the report: selects the curves of each chart, as data that page/report.js draws with uPlot."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

import numpy as np

from phalanx.config.joint import PAINTER, POLICIES, WRITER
from phalanx.run.telemetry.curves import Points
from phalanx.run.telemetry.run_folder import VALIDATION, Run
from phalanx.telemetry.loggers import ELAPSED, LOSS

MAX_POINTS = 1000  # per curve; longer ones are averaged, which is hardly visible on a screen
MAX_BARS = 120
COLOURS = 8  # the number of colours in page/report.css
# the order of the usual phases in a stack, from the bottom
_PHASES = {"rollout": 0, "judge": 1, "reward": 2, "update": 3, "checkpoint": 4, "validation": 5}


@dataclass(frozen=True)
class Series:
    """A curve: its label, its points (step, value), and half the height of the band around each point, if any, with the
    band's lower edge where the point is not in its middle.

    `colour` and `dash` are indices of styles in page/report.css and page/report.js.
    """

    label: str
    points: Points
    band: Points = field(default_factory=Points)
    low: Points = field(default_factory=Points)
    colour: int = 0
    dash: int = 0

    def data(self, limit: int) -> dict[str, Any]:
        """The curve in the format of page/report.js, with at most `limit` points."""
        steps, values = _point_columns(thin(self.points, limit))
        data: dict[str, Any] = {"label": self.label, "colour": self.colour, "dash": self.dash, "x": steps, "y": values}
        if self.band:
            _, data["band"] = _point_columns(thin(self.band.aligned(self.points.steps), limit))
        if len(self.low) == len(self.points):  # runs of earlier versions have none
            _, data["low"] = _point_columns(thin(self.low, limit))
        return data

    def summary(self, axis: str) -> str:
        """A description of the curve in words. axis: the name of what `points` calls steps."""
        (first, start), (last, end) = self.points[0], self.points[-1]
        low, high = min(self.points.values), max(self.points.values)
        return (
            f"{self.label} from {start:.4g} at {axis} {first} to {end:.4g} at {axis} {last}, lowest {low:.4g}, "
            f"highest {high:.4g}"
        )


@dataclass(frozen=True)
class Chart:
    """The curves of all metrics whose names match `keys`; a group in the pattern is the curve's label.

    `band` is the metric for half the height of the band and `low` the one for its lower edge, if it is not that much
    below the curve, with {} for the label; `spread` describes the band in the caption. `bars` stacks the values of each
    step. `plain` curves are not smoothed by the page, and their points are marked. `zero` starts the axis at 0. `axis`:
    step, or k for numbers of samples on a logarithmic axis.
    """

    title: str
    keys: str
    note: str = ""
    band: str = ""
    low: str = ""
    spread: str = "one standard deviation"
    bars: bool = False
    plain: bool = False
    zero: bool = False
    axis: str = "step"
    series: list[Series] = field(default_factory=list)

    @property
    def limit(self) -> int:
        return MAX_BARS if self.bars else MAX_POINTS

    def data(self) -> dict[str, Any]:
        """The chart in the format of page/report.js."""
        looks = {"bars": self.bars, "plain": self.plain, "zero": self.zero, "axis": self.axis}
        return looks | {"series": [series.data(self.limit) for series in self.series]}

    def html(self) -> str:
        """The <figure>. The script draws into `.plot`, which contains a description until then and as its label."""
        notes, summaries, longest = [self.note], [], 0
        for series in self.series:
            summaries.append(series.summary(self.axis))
            longest = max(longest, len(series.points))
            if series.band and len(notes) == 1:
                notes.append(f"The band is {self.spread}.")
        if longest > self.limit:
            notes.append(f"Each point is the mean of {math.ceil(longest / self.limit)} steps at most.")
        words = "; ".join(summaries)
        return (
            f'<figure class="chart"><figcaption>{escape(self.title)}</figcaption>'
            f'<div class="plot n" role="group" aria-label="{escape(f"{self.title}: {words}")}">{escape(words)}</div>'
            f'<p class="n">{escape(" ".join(notes).strip())}</p></figure>'
        )


CHARTS = (
    Chart("Loss", LOSS.pattern),
    Chart("Loss by noise level", "train/loss_at_(.+)", "On the masked tokens at each level."),
    Chart("Accuracy", "(?:train|actor)/accuracy", "On masked tokens, or on preferences between two samples."),
    Chart("Training reward", "reward/mean", band="reward/std"),
    Chart(
        "Validation reward",
        VALIDATION.pattern,
        "On held-out prompts.",
        band="val/{}/reward/ci95",
        low="val/{}/reward/ci95_low",
        spread="a 95 % interval of the mean over such prompts",
        plain=True,
    ),
    Chart(
        "Reward terms", "reward/(?!(?:mean|std|max|min|zero_std_ratio|std_mean)$).+", "Before weighting and summing."
    ),
    Chart(
        "Share of prompts whose samples all score the same", "reward/zero_std_ratio", "Such prompts give no gradient."
    ),
    Chart(
        "Rewritten prompts",
        "rewrite/(.+_ratio)",
        "Shares of responses that contain no prompt, a truncated prompt, or a distinct prompt.",
        zero=True,
    ),
    Chart("Response length (tokens)", "response/length_(mean|max|min)"),
    Chart("Truncated responses", "response/truncated_ratio", "Share truncated at data.max_response_length.", zero=True),
    Chart("Turns and calls per sample", "(conversation/turns_(?:mean|max)|tools/call_frequency)", zero=True),
    Chart("Reward by number of turns", "conversation/reward_turns_(.+)", "Mean over training samples with k turns."),
    Chart("Validation reward by number of turns", "val/(.+/conversation/reward_turns_.+)", plain=True),
    Chart("Entropy", "(?:actor|train)/entropy"),
    Chart("Importance ratio", "actor/ratio_mean", band="actor/ratio_std"),
    Chart("Clipped fraction", "actor/clipfrac(?:_higher|_lower)?"),
    Chart("Gradient norm", "actor/grad_norm", "Before clipping."),
    Chart("KL to the policy that sampled", "actor/approx_kl"),
    Chart("KL to the reference", "actor/kl_ref"),
    Chart("Throughput (images per second and rank)", "perf/images_per_gpu_per_s", zero=True),
    Chart("Throughput (samples per second and rank)", "perf/samples_per_gpu_per_s", zero=True),
    Chart("Throughput (tokens per second and rank)", "perf/(?:.+_)?tokens_per_gpu_per_s", zero=True),
    Chart(
        "Seconds by phase",
        "time/(.+)",
        "Concurrent phases, such as sampling and rewards, are stacked as well.",
        bars=True,
    ),
    Chart(
        "Idle share of each role", "idle/(.+)", "The time in which the role's first rank waits for others.", zero=True
    ),
    Chart(
        "FLOPs utilisation",
        "perf/(?:cpu_)?[mh]fu",
        "Share of the device's peak, or for a CPU (cpu_) of its measured rate of matrix products. hfu includes the "
        "recomputation by checkpointing, mfu does not.",
        zero=True,
    ),
    Chart("Peak memory (GB)", "perf/peak_memory_gb", zero=True),
)


def charts_of(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """CHARTS with the curves of these runs, and one chart for each other metric; the metrics of `constants_of` are
    omitted.
    """
    names: set[str] = set().union(*(run.metrics() for run in runs))
    constants = constants_of(runs)
    drawn, used = list[Chart](), set(constants)
    for chart in CHARTS:
        curves = _curves_of(chart, names)
        for key, (_, *band) in curves.items():
            used |= {key, *band}
        for run in runs if chart.bars else ():
            drawn.append(replace(chart, title=run.titled(chart.title), series=_phase_stack(run, curves)))
        if not chart.bars and not constants.keys() >= curves.keys():
            drawn.append(replace(chart, series=_chart_curves(curves, runs)))
    rest = []
    for name in sorted(names - used):
        curve = {name: (name, "", "")}
        rest.append(Chart(name, name, plain=name.startswith("val/"), series=_chart_curves(curve, runs)))
    return [chart for chart in drawn if chart.series], [chart for chart in rest if chart.series]


def constants_of(runs: Sequence[Run]) -> dict[str, float]:
    """The metrics, except seconds of phases, with the same value in all rows of all runs, and more than one row."""
    values: dict[str, set[float]] = {}
    repeated = set()
    for run in runs:
        for name in run.metrics():
            of_run = run.points(name).values
            values.setdefault(name, set()).update((min(of_run), max(of_run)) if of_run else ())
            if len(of_run) > 1 and not name.startswith(("time/", ELAPSED)):
                repeated.add(name)
    constants = {}
    for name in sorted(repeated):
        if len(values[name]) == 1:
            constants[name] = values[name].pop()
    return constants


def _curves_of(chart: Chart, names: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Those of the metrics that the chart shows, in its order: the label of each, and the metrics of the band around it
    and of the band's lower edge.
    """
    curves = {}
    for name in sorted(names, key=_policies_last):
        policy, plain = _of_policy(name)
        match = re.fullmatch(chart.keys, plain)
        if match is not None:
            band, low = (f"{policy}{form.format(*match.groups())}" for form in (chart.band, chart.low))
            curves[name] = f"{policy}{match[1]}" if match.groups() else name, band, low
    return curves


def _chart_curves(curves: Mapping[str, tuple[str, str, str]], runs: Sequence[Run]) -> list[Series]:
    """One curve per metric and run, each with a separate colour; curves that share a colour have different dashes. With
    several metrics and several runs, and enough colours, the dash identifies the run.
    """
    series = list[Series]()
    is_crowded = len(curves) * len(runs) > COLOURS
    for i, (name, (label, band, low)) in enumerate(curves.items()):
        for k, run in enumerate(runs):
            points = run.points(name)
            if not points:
                continue
            if len(runs) == 1:
                edges = run.points(band), run.points(low)
                series.append(Series(label, points, *edges, colour=i, dash=i // COLOURS))
            else:  # bands would hide the other runs and the differences between their means
                name_of = run.label if len(curves) == 1 else f"{run.label} · {label}"
                colour = i * len(runs) + k
                dash = colour // COLOURS if is_crowded or len(curves) == 1 else k
                series.append(Series(name_of, points, colour=colour, dash=dash))
    return series


def _of_policy(name: str) -> tuple[str, str]:
    """Split a joint run's metric into the prefix of its policy, such as `writer/`, and the rest; "" if it has none."""
    for policy in POLICIES:
        if name.startswith(f"{policy}/"):
            return f"{policy}/", name.removeprefix(f"{policy}/")
    return "", name


def _policies_last(name: str) -> tuple[bool, str, str]:
    """Sort key of metrics: those of the run first, then those of a joint run's writer, then of its painter."""
    policy, plain = _of_policy(name)
    return policy.startswith(PAINTER), policy, plain


def _phase_order(name: str) -> tuple[int, bool]:
    """Sort key of phases: the usual ones in order, then others; in a joint run the writer's before the painter's."""
    phase = name.removeprefix("time/")
    plain = phase.removeprefix(f"{WRITER}_").removeprefix(f"{PAINTER}_")
    return _PHASES.get(plain, len(_PHASES)), phase.startswith(PAINTER)


def _phase_stack(run: Run, names: Iterable[str]) -> list[Series]:
    """The seconds of each phase in all steps that have any phase; 0 for phases that a step lacks."""
    # the usual phases come first, so that the bottom of a bar with a validation looks like that of its neighbours
    ordered = sorted(names, key=_phase_order)
    steps = sorted(set[int]().union(*(run.points(name).steps for name in ordered)))
    series: list[Series] = []
    for name in ordered:
        if run.points(name):
            points = run.points(name).aligned(steps)
            series.append(Series(name.removeprefix("time/"), points, colour=len(series)))
    return series


def thin(points: Points, limit: int) -> Points:
    """Reduce a curve to at most `limit` points: means of consecutive points, at the middle step of each group."""
    if len(points) <= limit:
        return points
    bounds = np.arange(limit + 1) * len(points) // limit
    steps, values = points.columns()
    sizes = np.diff(bounds)
    # divided before they are summed, because the sum of a damaged file's values may be too large for a float
    means = np.add.reduceat(values / np.repeat(sizes, sizes), bounds[:-1])
    return Points(steps[bounds[:-1] + sizes // 2].tolist(), means.tolist())


def _point_columns(points: Points) -> tuple[list[int], list[float]]:
    """Steps and values, rounded to six digits: the page shows four, and each digit costs a byte per point."""
    steps, values = [], []
    for step, value in points:
        steps.append(step)
        values.append(float(f"{value:.6g}"))
    return steps, values
