"""Images for people to look at: captioned grids of many images, and strips of frames that represent a video."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from phalanx.functional.frames import evenly_spaced

STRIP = 4  # frames that represent a video in an image
TILE_MIN = 160  # pixels: narrower tiles have no room for a readable caption
TILE_MAX = 320
CAPTION_LINES = 3
CAPTION_SIZE = 13
_LINE_HEIGHT = CAPTION_SIZE + 4
_MARGIN = 8


def pictures(frames: NDArray[np.uint8]) -> list[Image.Image]:
    """Convert the frames [F, H, W, 3] to PIL images."""
    return [Image.fromarray(frame) for frame in frames]


def standing(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Select the frames [at most STRIP, H, W, 3] that represent a video [F, H, W, 3] in an image."""
    return frames[evenly_spaced(len(frames), STRIP)]


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Place pictures in a row, aligned at the top, on white if their heights differ."""
    size = sum(picture.width for picture in pictures), max(picture.height for picture in pictures)
    row, left = Image.new("RGB", size, "white"), 0
    for picture in pictures:
        row.paste(picture, (left, 0))
        left += picture.width
    return row


def sheet(
    tiles: Sequence[Image.Image], prompts: Sequence[str], columns: int, headings: Sequence[str] = ()
) -> Image.Image:
    """Arrange tiles in rows of `columns`, with the prompt of each below it, after its heading if there is one."""
    font = ImageFont.load_default(CAPTION_SIZE)
    width = max(TILE_MIN, *(tile.width for tile in tiles))
    captions = [wrap(prompt, font, width) for prompt in prompts]
    if headings:
        captions = [[heading, *lines] for heading, lines in zip(headings, captions, strict=True)]
    # all cells have the size of the largest one
    height = max(tile.height for tile in tiles) + max(map(len, captions)) * _LINE_HEIGHT + _MARGIN
    rows = math.ceil(len(tiles) / columns)
    size = (min(columns, len(tiles)) * (width + _MARGIN) + _MARGIN, rows * (height + _MARGIN) + _MARGIN)
    page = Image.new("RGB", size, (255, 255, 255))
    draw = ImageDraw.Draw(page)
    for i, (tile, lines) in enumerate(zip(tiles, captions, strict=True)):
        x = _MARGIN + i % columns * (width + _MARGIN)
        y = _MARGIN + i // columns * (height + _MARGIN)
        page.paste(tile, (x + (width - tile.width) // 2, y))
        for k, line in enumerate(lines):
            draw.text((x, y + tile.height + 3 + k * _LINE_HEIGHT), line, font=font, fill=(20, 20, 20))
    return page


def fit(image: Image.Image) -> Image.Image:
    """Scale an image whose longer side is not between TILE_MIN and TILE_MAX.

    Tiny images are enlarged by an integer factor without smoothing, so that their pixels stay visible.
    """
    longest = max(image.size)
    if longest < TILE_MIN:
        factor = math.ceil(TILE_MIN / longest)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if longest > TILE_MAX:
        scale = TILE_MAX / longest
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        return image.resize(size, Image.Resampling.LANCZOS)
    return image


def wrap(text: str, font: Any, width: int) -> list[str]:
    """Wrap a text into at most CAPTION_LINES lines of at most `width` pixels; an ellipsis marks a truncated text."""
    lines: list[str] = []
    words = text.split()
    while words and len(lines) < CAPTION_LINES:
        line = _take_line(words, font, width)
        if words and len(lines) == CAPTION_LINES - 1:
            while line and font.getlength(line + " …") > width:
                line = line[:-1]
            line += " …"
        lines.append(line)
    return lines


def _take_line(words: list[str], font: Any, width: int) -> str:
    """Remove the words that fit on one line from `words` and return them. A word wider than a line is split."""
    line = words.pop(0)
    if font.getlength(line) > width:
        cut = min(len(line), width)  # letters are at least a pixel wide
        while cut > 1 and font.getlength(line[:cut]) > width:
            cut -= 1
        words.insert(0, line[cut:])
        return line[:cut]
    while words and font.getlength(f"{line} {words[0]}") <= width:
        line = f"{line} {words.pop(0)}"
    return line
