"""Validation images on disk: one PNG a sample, an index beside them, and a grid with prompt and reward as captions.

Of videos the PNGs show some frames side by side; each video, and the grid of all, is an mp4 beside them.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from phalanx.functional.frames import evenly_spaced
from phalanx.videos import write_video

STRIP = 4  # frames of a video that stand for it in a picture
TILE_MIN = 160  # pixels: narrower tiles cannot hold a caption that one can read
TILE_MAX = 320
CAPTION_LINES = 3
CAPTION_SIZE = 13
_MARGIN = 8


@dataclass(frozen=True)
class ImageRecord:
    """One generated image, or video of `fps` frames a second.

    `image` is uint8 [H, W, 3], or [F, H, W, 3]; `index` is the prompt's number in its validation set (times the images
    a prompt, where there are several), so that the same index at two steps is the same prompt and noise.
    """

    prompt: str
    reward: float
    image: NDArray[np.uint8]
    index: int
    fps: int = 1

    @property
    def is_video(self) -> bool:
        """Whether there are frames."""
        return self.image.ndim == 4

    @property
    def frames(self) -> list["ImageRecord"]:
        """Each frame of a video as a record of its own; an image is its only one."""
        return [replace(self, image=frame) for frame in self.image] if self.is_video else [self]

    @property
    def stem(self) -> str:
        """Name of its files, without the ending."""
        return f"{self.index:05d}"


def step_folder(folder: Path, step: int, set_name: str) -> Path:
    """Where the images of one validation lie: `folder/<set>/step_000010`."""
    if not set_name or set_name in (".", "..") or "/" in set_name:
        raise ValueError(f"images: {set_name!r} cannot name a validation set's folder; use a name without '/'")
    return folder / set_name / f"step_{step:06d}"


def save_images(folder: Path, step: int, set_name: str, records: Iterable[ImageRecord]) -> Path:
    """Write the images of one validation and return their folder.

    The folder holds `00003.png` for index 3, `grid.png`, and `index.jsonl` with `index`, `prompt`, `reward` (null where
    it is not finite) and `file` in the order of the index; of videos also `00003.mp4`, as `video` in the index, and
    `grid.mp4`. It appears at once, complete, and replaces an older one.
    """
    rows = sorted(records, key=lambda record: record.index)
    assert len({record.index for record in rows}) == len(rows), "images: two records have one index"
    final = step_folder(folder, step, set_name)
    partial = final.with_name(final.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_images(partial, rows)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk it would keep others from writing
        raise
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    return final


def _write_images(folder: Path, rows: list[ImageRecord]) -> None:
    lines = []
    for record in rows:
        line = {
            "index": record.index,
            "prompt": record.prompt,
            "reward": record.reward if math.isfinite(record.reward) else None,
            "file": f"{record.stem}.png",
        }
        side_by_side([Image.fromarray(_rgb(frame)) for frame in standing(record)]).save(folder / f"{record.stem}.png")
        if record.is_video:
            line["video"] = f"{record.stem}.mp4"
            write_video(folder / f"{record.stem}.mp4", record.image, record.fps)
        lines.append(line)
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    (folder / "index.jsonl").write_text(text, encoding="utf-8")
    if rows:
        grid(rows).save(folder / "grid.png")
    if rows and rows[0].is_video:
        write_video(folder / "grid.mp4", moving_grid(rows), rows[0].fps)


def moving_grid(rows: list[ImageRecord]) -> Iterable[NDArray[np.uint8]]:
    """The frames of the grid of videos of one length, uint8 [H, W, 3] each."""
    return (np.asarray(grid(list(at_once))) for at_once in zip(*(record.frames for record in rows), strict=True))


def standing(record: ImageRecord) -> list[ImageRecord]:
    """The frames that stand for a video in a picture; the image itself."""
    frames = record.frames
    return [frames[i] for i in evenly_spaced(len(frames), STRIP)]


def side_by_side(pictures: list[Image.Image]) -> Image.Image:
    """Pictures of one size in a row."""
    if len(pictures) == 1:
        return pictures[0]
    width, height = pictures[0].size
    row = Image.new("RGB", (len(pictures) * width, height))
    for i, picture in enumerate(pictures):
        row.paste(picture, (i * width, 0))
    return row


def read_index(folder: Path) -> list[dict[str, Any]]:
    """The rows of a folder's `index.jsonl`; empty where there is none. Raises ValueError for a broken row."""
    path = folder / "index.jsonl"
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or not row.keys() >= {"index", "prompt", "reward", "file"}:
            raise ValueError(f"{path}:{number}: not a row with index, prompt, reward and file")
        rows.append(row)
    return rows


def grid(records: list[ImageRecord]) -> Image.Image:
    """All images in one picture, about as wide as high, each with its reward and prompt below it.

    Tiny images are enlarged by a whole factor without smoothing, so that their pixels stay visible; large ones shrink.
    """
    font = ImageFont.load_default(CAPTION_SIZE)
    strips = [[fit(Image.fromarray(_rgb(frame))) for frame in standing(record)] for record in records]
    tiles = [side_by_side(strip) for strip in strips]
    columns = math.ceil(math.sqrt(len(tiles) / len(strips[0])))
    width = max(TILE_MIN, *(tile.width for tile in tiles))
    captions = [caption(record.prompt, record.reward, font, width) for record in records]
    line_height = CAPTION_SIZE + 4
    height = max(tile.height for tile in tiles) + max(len(c) for c in captions) * line_height + _MARGIN
    rows = math.ceil(len(tiles) / columns)
    picture = Image.new(
        "RGB", (columns * (width + _MARGIN) + _MARGIN, rows * (height + _MARGIN) + _MARGIN), (255, 255, 255)
    )
    draw = ImageDraw.Draw(picture)
    for i, (tile, lines) in enumerate(zip(tiles, captions, strict=True)):
        x = _MARGIN + (i % columns) * (width + _MARGIN)
        y = _MARGIN + (i // columns) * (height + _MARGIN)
        picture.paste(tile, (x + (width - tile.width) // 2, y))
        for k, line in enumerate(lines):
            draw.text((x, y + tile.height + 3 + k * line_height), line, font=font, fill=(20, 20, 20))
    return picture


def fit(image: Image.Image) -> Image.Image:
    """Scaled to a side between TILE_MIN and TILE_MAX: whole factors upwards, smooth downwards."""
    longest = max(image.size)
    if longest < TILE_MIN:
        factor = math.ceil(TILE_MIN / longest)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if longest > TILE_MAX:
        scale = TILE_MAX / longest
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        return image.resize(size, Image.Resampling.LANCZOS)
    return image


def caption(prompt: str, reward: float, font: Any, width: int) -> list[str]:
    """The reward, then the prompt broken into lines of at most `width` pixels; an ellipsis where it is cut."""
    lines = [f"reward {reward:.3f}"]
    words = prompt.split()
    while words and len(lines) <= CAPTION_LINES:
        line = _take(words, font, width)
        if len(lines) == CAPTION_LINES and words:
            while line and font.getlength(line + " …") > width:
                line = line[:-1]
            line += " …"
        lines.append(line)
    return lines


def _take(words: list[str], font: Any, width: int) -> str:
    """Remove from `words` what fits on one line, and return it. A word wider than a line is cut into pieces."""
    line = words.pop(0)
    if font.getlength(line) > width:
        cut = min(len(line), width)  # no letter is narrower than a pixel
        while cut > 1 and font.getlength(line[:cut]) > width:
            cut -= 1
        words.insert(0, line[cut:])
        return line[:cut]
    while words and font.getlength(f"{line} {words[0]}") <= width:
        line = f"{line} {words.pop(0)}"
    return line


def _rgb(record: ImageRecord) -> NDArray[np.uint8]:
    """The record's image, checked."""
    image = record.image
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(
            f"images: record {record.index} is {image.dtype} {list(image.shape)}; uint8 [H, W, 3] was expected"
        )
    return image
