"""The picture of a model card: the rewards of a run over its steps, or its losses where it has no rewards, as a PNG.

It is drawn with Pillow, which every installation has, and the hub shows it as it is.
"""

from dataclasses import dataclass, field
from math import inf

from PIL import Image, ImageDraw, ImageFont

from phalanx.run.telemetry.run_folder import Run
from phalanx.telemetry.loggers import LOSS
from phalanx.tools.board.comparison import Bounds, validation_bounds

WIDTH, HEIGHT = 860, 340  # pixels
LEFT, RIGHT, TOP, BOTTOM = 70, 40, 40, 40  # margins around the axes
SCALE = 2  # it is drawn at this size and reduced, which smooths the lines
GREY, INK = "#9aa0a6", "#333333"
COLOURS = "#3f51b5", "#e65100", "#00796b", "#8e24aa", "#558b2f"
MOST_LINES = 1 + len(COLOURS)


@dataclass(frozen=True)
class Line:
    """The points (step, value) of a metric, and the intervals of some of them by step."""

    label: str
    points: list[tuple[int, float]]
    intervals: dict[int, Bounds] = field(default_factory=dict)


def lines_of(run: Run, last: int) -> list[Line]:
    """The training reward and the validations up to step `last`; the losses of a run without rewards."""
    lines = [Line("training reward", [point for point in run.points("reward/mean") if point[0] <= last])]
    for name, points in run.validations().items():
        kept = [point for point in points if point[0] <= last]
        intervals = {}
        for step, _ in kept:
            bounds = validation_bounds(run, name, step)
            if bounds is not None:
                intervals[step] = bounds
        lines.append(Line(name, kept, intervals))
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        losses = filter(LOSS.fullmatch, run.metrics())
        lines = [Line(key, [point for point in run.points(key) if point[0] <= last]) for key in losses]
    return [line for line in lines if len(line.points) > 1][:MOST_LINES]


def draw(lines: list[Line]) -> Image.Image:
    """One picture of all lines, with bands for their intervals."""
    steps = [step for line in lines for step, _ in line.points]
    low, high = inf, -inf
    for line in lines:
        values = [value for _, value in line.points] + [end for bounds in line.intervals.values() for end in bounds]
        low, high = min(low, *values), max(high, *values)
    first, last = min(steps), max(steps)
    high = high if high > low else low + (abs(low) or 1)
    picture = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
    brush = ImageDraw.Draw(picture, "RGBA")

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return x * SCALE, y * SCALE

    font = ImageFont.load_default(13 * SCALE)
    for part in (0.0, 0.5, 1.0):
        value, step = low + part * (high - low), round(first + part * (last - first))
        brush.line((at(first, value), at(last, value)), fill="#e4e4e4", width=SCALE)
        brush.text((at(first, value)[0] - 8 * SCALE, at(first, value)[1]), f"{value:.3g}", INK, font, anchor="rm")
        brush.text((at(step, low)[0], at(step, low)[1] + 8 * SCALE), f"step {step}", INK, font, anchor="ma")
    colours = iter(COLOURS)
    place = float(LEFT * SCALE)
    for line in lines:
        colour = GREY if line.label == "training reward" else next(colours, GREY)
        if len(line.intervals) > 1:
            edges = sorted(line.intervals.items())
            upper = [at(step, bounds.high) for step, bounds in edges]
            lower = [at(step, bounds.low) for step, bounds in reversed(edges)]
            brush.polygon(upper + lower, fill=f"{colour}30")
        brush.line([at(*point) for point in line.points], fill=colour, width=2 * SCALE, joint="curve")
        brush.text((place, TOP / 2 * SCALE), line.label, colour, font, anchor="lm")
        place += font.getlength(f"{line.label}     ")
    return picture.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)
