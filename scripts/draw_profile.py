"""Draws a profile of trainer.profile_steps: the phases of each rank, and the kinds of operations that fill them.

make quickstart ARGS="trainer.profile_steps=[3] trainer.total_training_steps=3 trainer.experiment_name=profiled"
python scripts/draw_profile.py outputs/phalanx/profiled/profiles/step_000003 docs/images/profile.svg
"""

import gzip
import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

# by words in the names of operations; the first that fits counts
KINDS = {
    "linear layers": ("linear", "addmm", "aten::mm", "bmm"),
    "attention": ("attention",),
    "convolutions": ("conv",),
    "collectives": ("gloo", "nccl", "c10d"),
    "other operations": ("",),
}
COLORS = ("#3f51b5", "#00897b", "#8e24aa", "#ef6c00", "#90a4ae")
INK, PHASES = "#263238", ("#c5cae9", "#ffe0b2", "#c8e6c9", "#eeeeee")
LEFT, TOP, WIDTH, HEIGHT, STEP, LINE = 70, 34, 690, 70, 130, 18
BINS = 150


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{INK}" text-anchor="{anchor}">{escape(words)}</text>'
    )


def kind_of(name: str) -> int:
    name = name.lower()
    return next(number for number, words in enumerate(KINDS.values()) if any(word in name for word in words))


def pieces(operations: list[dict[str, Any]]) -> Iterator[tuple[int, float, float]]:
    """(kind, begin, end) of the times in which an operation runs itself, and none that it calls."""
    running: list[tuple[int, float]] = []
    now = 0.0
    for one in sorted(operations, key=lambda one: (one["ts"], -one["dur"])):
        while running and running[-1][1] <= one["ts"]:
            kind, end = running.pop()
            yield kind, now, max(now, end)
            now = max(now, end)
        if running:
            yield running[-1][0], now, one["ts"]
        now = one["ts"]
        running.append((kind_of(one["name"]), one["ts"] + one["dur"]))
    for kind, end in reversed(running):
        yield kind, now, max(now, end)
        now = max(now, end)


def rank(file: Path, y: float) -> tuple[list[str], list[float]]:
    """A rank's lanes, and the seconds of each kind."""
    with gzip.open(file) as stream:
        events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    phases = [event for event in ranges if event["name"].isidentifier()]  # torch has ranges of its own
    thread, begin = phases[0]["tid"], min(phase["ts"] for phase in phases)
    scale = WIDTH / (max(phase["ts"] + phase["dur"] for phase in phases) - begin)
    parts = [text(LEFT - 8, y + 12, file.name.split(".")[0].replace("_", " "), "end")]
    names = list(dict.fromkeys(phase["name"] for phase in phases))
    for phase in phases:
        x, width = LEFT + (phase["ts"] - begin) * scale, phase["dur"] * scale
        color = PHASES[names.index(phase["name"]) % len(PHASES)]
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LINE}" fill="{color}"/>')
        if width > 50:
            parts.append(text(x + 4, y + 13, f"{phase['name']} {phase['dur'] / 1e6:.1f} s", size=11))
    operations = [event for event in events if event.get("cat") == "cpu_op" and event["tid"] == thread]
    filled = [[0.0] * BINS for _ in KINDS]
    for kind, start, end in pieces(operations):
        while start < end:
            number = int((start - begin) * scale / WIDTH * BINS)
            until = min(end, begin + (number + 1) * WIDTH / BINS / scale + 1e-3)
            if 0 <= number < BINS:
                filled[kind][number] += until - start
            start = until
    for number in range(BINS):
        base = y + LINE + HEIGHT
        for kind, color in enumerate(COLORS):
            height = filled[kind][number] * scale / WIDTH * BINS * HEIGHT
            base -= height
            if height > 0.3:
                x = LEFT + number * WIDTH / BINS
                place = f'x="{x:.1f}" y="{base:.1f}" width="{WIDTH / BINS:.1f}" height="{height:.1f}"'
                parts.append(f'<rect {place} fill="{color}"/>')
    parts.append(f'<path d="M{LEFT} {y + LINE + HEIGHT}h{WIDTH}" stroke="{INK}"/>')
    return parts, [sum(row) / 1e6 for row in filled]


def main(folder: Path, output: Path) -> None:
    """Draw the first two ranks."""
    parts, seconds = [], [0.0] * len(KINDS)
    files = sorted(folder.glob("rank_*.json.gz"))[:2]
    for number, file in enumerate(files):
        lanes, of_rank = rank(file, TOP + number * STEP)
        parts += lanes
        seconds = of_rank if number == 0 else seconds
    x = float(LEFT)
    for name, color, value in zip(KINDS, COLORS, seconds, strict=True):
        if value < 0.005:
            continue
        label = f"{name} {value:.2f} s"
        parts.append(
            f'<rect x="{x:.1f}" y="10" width="10" height="10" fill="{color}"/>{text(x + 14, 19, label, size=11)}'
        )
        x += 30 + 5.7 * len(label)
    base = TOP + len(files) * STEP - 22
    parts.append(
        text(LEFT, base, "Above: seconds of rank 0. Columns: share of the time; white is Python, or a wait.", size=11)
    )
    size = f'width="{LEFT + WIDTH + 20}" height="{TOP + len(files) * STEP - 8}"'
    style = f'xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"'
    output.write_text(f'<svg {style}><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n')


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
