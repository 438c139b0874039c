"""Curves and stacked bars as inline SVG with axes, legends and tooltips, for pages that load nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

MAX_POINTS = 240  # of a curve; longer ones are averaged, which also evens out noise that no screen can show
MAX_BARS = 48
COLOURS = 8  # --c1 ... --c8 of the page's style
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 230, 62, 14, 12, 30

Point = tuple[float, float]

CHART_CSS = """
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,420px),1fr));gap:12px}
.chart{padding:14px 16px 12px}
.chart figcaption{font-weight:600}
.chart svg{display:block;width:100%;height:auto;margin-top:6px}
.chart text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 14px;margin:2px 0 0;padding:0}
.legend li{font-size:13px;color:var(--soft)}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.grid{stroke:var(--line)}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.s2{stroke-dasharray:7 4}
.s3{stroke-dasharray:2 5}
.band{opacity:.16}
.hit{fill:var(--ink);fill-opacity:0}
.hit:hover{fill-opacity:.08}
""" + "".join(
    f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}.b{i}{{background:var(--c{i})}}\n"
    for i in range(1, COLOURS + 1)
)


@dataclass(frozen=True)
class Series:
    """A curve: its label, points (step, value), and half the height of the band around each point, if any."""

    label: str
    points: list[Point]
    band: list[Point] = field(default_factory=list)

    def edges(self) -> tuple[list[Point], list[Point]]:
        """The band's upper and lower edge, from left to right; the curve itself where there is none."""
        widths = dict(self.band)
        upper = [(x, y + widths.get(x, 0.0)) for x, y in self.points]
        lower = [(x, y - widths.get(x, 0.0)) for x, y in self.points]
        return upper, lower


def line_chart(title: str, series: list[Series], note: str = "", *, marks: bool = False, zero: bool = False) -> str:
    """Curves over steps as an HTML <figure>; empty if there is no series.

    Every series has at least one point. `marks` draws each point, `zero` starts the axis at 0.
    """
    if not series:
        return ""
    thin = [Series(s.label, _thin(s.points, MAX_POINTS), _thin(s.band, MAX_POINTS)) for s in series]
    edges = [s.edges() for s in thin]
    corners = [point for upper, lower in edges for point in upper + lower]
    x_of, y_of, frame = _axes([x for x, _ in corners], [y for _, y in corners], zero)

    def places(points: list[Point]) -> str:
        return " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)

    shapes = [frame]
    for i, (s, (upper, lower)) in enumerate(zip(thin, edges, strict=True)):
        colour = i % COLOURS + 1
        if s.band and len(s.points) > 1:
            shapes.append(f'<polygon class="band f{colour}" points="{places(upper + lower[::-1])}"/>')
        shapes.append(f'<polyline class="line s{colour}" points="{places(s.points)}"/>')
        if marks or len(s.points) <= 2:
            for x, y in s.points:
                shapes.append(f'<circle class="f{colour}" cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="3.5"/>')
    shapes.append(_tooltips(thin, x_of))
    return _figure(title, thin, shapes, note + _averaged(max(len(s.points) for s in series), MAX_POINTS))


def stacked_bars(title: str, series: list[Series], note: str = "") -> str:
    """One bar per step, split by series, as an HTML <figure>; all series have the same steps."""
    if not series:
        return ""
    thin = [Series(s.label, _thin(s.points, MAX_BARS)) for s in series]
    xs = [x for x, _ in thin[0].points]
    totals = [sum(s.points[k][1] for s in thin) for k in range(len(xs))]
    gap = min((b - a for a, b in pairwise(xs)), default=1.0)
    x_of, y_of, frame = _axes([xs[0] - gap / 2, xs[-1] + gap / 2], [0.0, *totals], True)
    width = max(1.0, (x_of(gap) - x_of(0)) * 0.8)
    shapes = [frame]
    for k, x in enumerate(xs):
        base = 0.0
        for i, s in enumerate(thin):
            top = base + s.points[k][1]
            shapes.append(
                f'<rect class="f{i % COLOURS + 1}" x="{x_of(x) - width / 2:.1f}" y="{y_of(top):.1f}" '
                f'width="{width:.1f}" height="{max(0.0, y_of(base) - y_of(top)):.1f}"/>'
            )
            base = top
    shapes.append(_tooltips(thin, x_of))
    return _figure(title, thin, shapes, note + _averaged(len(series[0].points), MAX_BARS))


def _thin(points: list[Point], limit: int) -> list[Point]:
    """At most `limit` points, each the mean of equally many neighbours."""
    size = max(1, math.ceil(len(points) / limit))
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks]


def _averaged(count: int, limit: int) -> str:
    size = math.ceil(count / limit)
    return f" Each point is the mean of {size} steps." if size > 1 else ""


def _figure(title: str, series: list[Series], shapes: list[str], note: str) -> str:
    """A chart with its title, legend and a description in words."""
    summary = "; ".join(
        f"{s.label} from {s.points[0][1]:.4g} at step {s.points[0][0]:g} to {s.points[-1][1]:.4g} at step "
        f"{s.points[-1][0]:g}, lowest {min(y for _, y in s.points):.4g}, highest {max(y for _, y in s.points):.4g}"
        for s in series
    )
    legend = "".join(f'<li><i class="b{i % COLOURS + 1}"></i>{escape(s.label)}</li>' for i, s in enumerate(series))
    return (
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption><ul class="legend">{legend}</ul>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(f"{title}: {summary}", quote=True)}">'
        f'{"".join(shapes)}</svg><p class="n">{escape(note)}</p></figure>'
    )


def _axes(
    xs: list[float], ys: list[float], zero: bool
) -> tuple[Callable[[float], float], Callable[[float], float], str]:
    """Functions from step and value to pixels, and the SVG of grid and ticks."""
    x0, x1 = min(xs), max(xs)
    x0, x1 = (x0 - 0.5, x1 + 0.5) if x0 == x1 else (x0, x1)
    y0, y1 = min(ys), max(ys)
    if y1 - y0 <= 1e-6 * max(abs(y0), abs(y1)):  # flat up to rounding
        y0, y1 = (y0 - 0.1 * abs(y0), y1 + 0.1 * abs(y1)) if y1 else (-1.0, 1.0)
    pad = 0.06 * (y1 - y0)
    y0, y1 = (0.0 if zero else y0 - pad), y1 + pad

    def x_of(x: float) -> float:
        return _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y0) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for value, text in _ticks(y0, y1, 5):
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for value, text in _ticks(x0, x1, 7, whole=True):
        parts.append(f'<text x="{x_of(value):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{_LEFT - 8}" y="{_HEIGHT - 10}" text-anchor="end">step</text>')
    return x_of, y_of, "".join(parts)


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[tuple[float, str]]:
    """Round values between low and high with their labels, about `count` of them."""
    # the step is 1, 2 or 5 times a power of ten, the first of these that gives no more ticks than wanted
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    step = max(1.0, step) if whole else step
    # as many digits as tell two neighbouring ticks apart
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    values = [k * step for k in range(first, last + 1)]
    small = digits > 6 and max(abs(low), abs(high)) < 1e-3
    return [(v, f"{v:.1e}" if small and v else f"{v:,.{0 if v == 0 else digits}f}") for v in values]


def _tooltips(series: list[Series], x_of: Callable[[float], float]) -> str:
    """Invisible columns, each with a tooltip of all values at its step."""
    table: dict[float, list[str]] = {}
    for s in series:
        for x, y in s.points:
            table.setdefault(x, []).append(f"{s.label} {y:.4g}")
    xs = sorted(table)
    parts = []
    for k, x in enumerate(xs):
        left = x_of((x + xs[k - 1]) / 2) if k else _LEFT
        right = x_of((x + xs[k + 1]) / 2) if k + 1 < len(xs) else _WIDTH - _RIGHT
        text = escape("\n".join([f"step {x:g}", *table[x]]))
        parts.append(
            f'<rect class="hit" x="{left:.1f}" y="{_TOP}" width="{max(0.0, right - left):.1f}" '
            f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>{text}</title></rect>'
        )
    return "".join(parts)
