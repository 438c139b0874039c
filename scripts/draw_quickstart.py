"""Draws a run that trained on word problems: accuracy over its steps, and answers before and after.

make quickstart-lm && python scripts/draw_quickstart.py outputs/phalanx/quickstart_lm docs/images/quickstart_lm.svg
make quickstart-bd && python scripts/draw_quickstart.py outputs/phalanx/quickstart_bd docs/images/quickstart_bd.svg
"""

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

METRIC = "val/test/reward/gsm8k"
INK, GREY, LINE, RIGHT, WRONG = "#263238", "#90a4ae", "#3f51b5", "#2e7d32", "#c62828"
LEFT, TOP, SIDE, HEIGHT = 50, 46, 270, 170  # of the plot
TABLE, AFTER, ROW, PROBLEMS = 370, 570, 50, 4  # the columns of the table, the height of a row, and how many there are


def text(x: float, y: float, words: str, color: str = INK, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{escape(words)}</text>'


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def plot(run: Path) -> list[str]:
    """The share of right greedy answers to held-out problems."""
    points = [(row["step"], row[METRIC]) for row in read(run / "metrics.jsonl") if METRIC in row]
    last = points[-1][0]
    parts = [text(LEFT, TOP - 18, "greedy accuracy on 200 held-out problems", size=13)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + HEIGHT * (1 - share)
        parts.append(f'<path d="M{LEFT} {y}h{SIDE}" stroke="#eceff1"/>')
        parts.append(text(LEFT - 6, y + 4, f"{share:.0%}", GREY, "end", 11))
    at = [(LEFT + SIDE * step / last, TOP + HEIGHT * (1 - value)) for step, value in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{LINE}"/>' for x, y in at]
    for step, _ in points:
        parts.append(text(LEFT + SIDE * step / last, TOP + HEIGHT + 18, str(step), GREY, "middle", 11))
    parts.append(text(at[0][0] + 10, at[0][1] + 16, f"{points[0][1]:.1%}", LINE))
    parts.append(text(at[-1][0], at[-1][1] - 8, f"{points[-1][1]:.1%}", LINE, "end"))
    parts.append(text(LEFT + SIDE / 2, TOP + HEIGHT + 36, "training step", GREY, "middle", 11))
    return parts


def table(run: Path) -> list[str]:
    """The first problems that the base answers wrongly, with the answers at the first and the last validation."""
    steps = sorted((run / "samples" / "test").iterdir())
    pairs = zip(read(steps[0] / "index.jsonl"), read(steps[-1] / "index.jsonl"), strict=True)
    parts = [text(TABLE, TOP - 18, "before", GREY), text(AFTER, TOP - 18, "after", GREY)]
    wrong = [(before, after) for before, after in pairs if before["reward"] == 0]
    for number, (before, after) in enumerate(wrong[:PROBLEMS]):
        y = TOP + 8 + number * ROW
        parts.append(text(TABLE, y, before["prompt"], size=11))
        for x, answer in ((TABLE, before), (AFTER, after)):
            parts.append(text(x, y + 18, " ".join(answer["text"].split()), RIGHT if answer["reward"] else WRONG))
    return parts


def draw(run: Path) -> str:
    """The picture."""
    size = f'viewBox="0 0 940 {TOP + HEIGHT + 48}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join(
        [head, '<rect width="100%" height="100%" rx="8" fill="white"/>', *plot(run), *table(run), "</svg>", ""]
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    Path(sys.argv[2]).write_text(draw(Path(sys.argv[1])))
