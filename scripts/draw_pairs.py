"""Draw pictures of a run on numbers: the first held-out prompts before and after training, in pairs.

    make quickstart && python scripts/draw_pairs.py outputs/phalanx/quickstart docs/images

It writes quickstart.png into the folder.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image, ImageDraw, ImageFont

METRIC = "val/{}/reward/mean"
COLUMNS, ROWS, CELL, GAP = 4, 4, (144, 72), 8  # pixels
LEFT, TOP, TEXT, PAIR = 22, 44, 24, 320  # of the pairs: their place, the height of a line and the width of a pair
FONT = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
Samples = list[tuple[dict[str, Any], Image.Image]]


def read(folder: Path) -> Samples:
    """The first samples of a validation, with their pictures enlarged pixel by pixel."""
    samples = []
    for line in (folder / "index.jsonl").read_text().splitlines()[: COLUMNS * ROWS]:
        row = json.loads(line)
        with Image.open(folder / row["file"]) as picture:
            samples.append((row, picture.convert("RGB").resize(CELL, Image.Resampling.NEAREST)))
    return samples


def pairs(before: Samples, after: Samples, title: str) -> Image.Image:
    """The pictures of each prompt beside each other, with their rewards."""
    sheet = Image.new("RGB", (LEFT + COLUMNS * PAIR, TOP + ROWS * (CELL[1] + TEXT) + 16), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(str(FONT), 14)
    draw.text((LEFT, 12), title, "black", font)
    small = font.font_variant(size=13)
    for number, sides in enumerate(zip(before, after, strict=True)):
        y = TOP + number // COLUMNS * (CELL[1] + TEXT)
        for side, (row, picture) in enumerate(sides):
            x = LEFT + number % COLUMNS * PAIR + side * (CELL[0] + 10)
            sheet.paste(picture, (x, y))
            wanted = row["prompt"].split('"')[1]  # of: the number "439"
            name = "" if side else f"{wanted}   "
            draw.text((x, y + CELL[1] + 5), f"{name}{row['reward']:.2f}", "black", small)
    return sheet


def main() -> None:
    """Draw the pictures."""
    run, output = map(Path, sys.argv[1:])
    (kept,) = (run / "images").iterdir()  # of the validation set
    steps = sorted(kept.glob("step_*"))
    before, after = read(steps[0]), read(steps[-1])
    key = METRIC.format(kept.name)
    rewards = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if key in row:
            rewards.append((row["step"], row[key]))
    title = f"Each pair: before training (left) and after {rewards[-1][0]} steps (right), on held-out numbers."
    title += f" Mean OCR reward {rewards[0][1]:.3f} → {rewards[-1][1]:.3f}."
    pairs(before, after, title).save(output / "quickstart.png", optimize=True)
    print(output / "quickstart.png")


if __name__ == "__main__":
    main()
