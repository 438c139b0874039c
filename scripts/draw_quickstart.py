"""Draws the run of a quickstart of texts: accuracy over its steps, and answers before and after.

    make quickstart-lm && python scripts/draw_quickstart.py outputs/phalanx/quickstart_lm docs/images/quickstart_lm.svg

and likewise with quickstart-bd, quickstart-tools and quickstart-vl.
"""

import base64
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


def words_of(row: dict[str, Any]) -> str:
    """A sample's answer in one line, with its calls of tools and their results."""
    parts = []
    for message in row.get("messages", ({}, {"content": row["text"]}))[1:]:
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"].values()
            parts.append(f"{call['function']['name']}({', '.join(map(str, arguments))})")
        parts.append(f"→ {message['content']};" if message.get("role") == "tool" else message["content"])
    return " ".join(" ".join(parts).split())


def table(run: Path) -> list[str]:
    """The first problems that the base answers wrongly, with the answers at the first and the last validation."""
    steps = sorted((run / "samples" / "test").iterdir())
    pairs = zip(read(steps[0] / "index.jsonl"), read(steps[-1] / "index.jsonl"), strict=True)
    wrong = [(before, after) for before, after in pairs if before["reward"] == 0][:PROBLEMS]
    left = TABLE + (110 if "images" in wrong[0][0] else 0)
    right = min(AFTER, left + 30 + 8 * max(len(words_of(before)) for before, _ in wrong))
    parts = [text(left, TOP - 18, "before", GREY), text(right, TOP - 18, "after", GREY)]
    for number, (before, after) in enumerate(wrong):
        y = TOP + 8 + number * ROW
        shown = before.get("images", ())
        for image in shown:
            data = base64.b64encode((steps[0] / image["file"]).read_bytes()).decode()
            place = f'x="{TABLE}" y="{y - 12}" width="{2 * image["width"]}" height="{ROW - 8}"'
            parts.append(f'<image {place} style="image-rendering:pixelated" href="data:image/png;base64,{data}"/>')
        if not shown:
            parts.append(text(TABLE, y, before["prompt"], size=11))
        for x, answer in ((left, before), (right, after)):
            parts.append(text(x, y + (10 if shown else 18), words_of(answer), RIGHT if answer["reward"] else WRONG))
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
