"""Validation samples on disk: images/<set>/step_<k> for images and videos, samples/<set>/step_<k> for texts.

Each folder contains an index.jsonl with prompts, rewards and texts. Images are saved beside it as PNGs, with a grid of
all of them; videos are mp4s, with PNGs that show some frames side by side. For texts, the images of their prompts are
saved as small PNGs.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from phalanx.config.files import json_object
from phalanx.config.inside import open_inside, write_inside
from phalanx.config.messages import counted
from phalanx.media.grids import fit, pictures, sheet, side_by_side, standing
from phalanx.media.pictures import Picture
from phalanx.media.videos import write_video

IMAGES, SAMPLES = "images", "samples"  # folders of a run: the former for images and videos, the latter for texts
# keys of multi-turn samples, in the index and in the metadata passed to rewards: see docs/environments.md
CONVERSATION = ("messages", "turns", "tool_calls", "ended", "environment_seconds", "turn_rewards")
TALKS = "environment_reward"  # a key in the metadata of multi-turn samples only
Output = NDArray[np.uint8] | str
SHOWN_SIDE = 256  # maximum side of the saved images of prompts, in pixels


@dataclass(frozen=True)
class Thumbnail:
    """An image of a prompt: its place in the data, the size of the original, and pixels uint8 [h, w, 3], with neither
    side longer than SHOWN_SIDE.
    """

    place: str
    height: int
    width: int
    pixels: NDArray[np.uint8]

    @classmethod
    def of(cls, picture: Picture) -> "Thumbnail":
        """The thumbnail of a picture. Raises ValueError if it cannot be read."""
        return cls(picture.where, *picture.size, picture.thumbnail(SHOWN_SIDE))

    @property
    def title(self) -> str:
        """The place and size of the image, as one line."""
        return f"{self.place}, {self.width} x {self.height} pixels"

    @property
    def file(self) -> str:
        """The name of the file, which prompts with the same image share."""
        digest = hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).hexdigest()
        return f"shown_{digest[:16]}.png"


@dataclass(frozen=True)
class Record:
    """One generated sample: `output` is an image uint8 [H, W, 3], a video [F, H, W, 3] with `fps` frames per second, or
    a text.

    `index` is the prompt's number in its validation set; equal indices at two steps mean the same prompt and noise.
    `scores` maps the terms of the reward to their values, and `ground_truth` comes from the data. `truncated`: the text
    ends at the length limit instead of an end-of-sequence token. `conversation`: the values of CONVERSATION, if the
    text is the last turn of a conversation. `images` are those in the prompt of a text.
    """

    prompt: str
    reward: float
    output: Output
    index: int
    fps: int = 1
    scores: dict[str, float] = field(default_factory=dict)
    ground_truth: str | None = None
    truncated: bool = False
    conversation: dict[str, Any] | None = None
    images: tuple[Thumbnail, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.output, str):
            return
        shape = self.output.shape
        if self.output.dtype != np.uint8 or len(shape) not in (3, 4) or shape[-1] != 3:
            raise ValueError(
                f"images: record {self.index} is {self.output.dtype} {list(shape)}; expected uint8 [H, W, 3], or "
                "[F, H, W, 3]"
            )

    @property
    def frames(self) -> NDArray[np.uint8]:
        """The frames [F, H, W, 3] of a video; an image is a single frame."""
        assert not isinstance(self.output, str), "a text has no frames"
        return self.output if self.output.ndim == 4 else self.output[None]

    @property
    def is_video(self) -> bool:
        """Whether the output is a video."""
        return not isinstance(self.output, str) and self.output.ndim == 4

    @property
    def stem(self) -> str:
        """The name of the sample's files, without the suffix."""
        return f"{self.index:05d}"

    @property
    def transcript(self) -> str:
        """The whole conversation as text, or a single-turn text itself."""
        assert isinstance(self.output, str), "only texts have transcripts"
        if self.conversation is None:
            return self.output
        return as_text(self.conversation["messages"])

    @property
    def caption(self) -> str:
        """The reward and prompt, as one line."""
        return f"{self.reward:.3f}: {self.prompt}"

    def row(self) -> dict[str, Any]:
        """The common part of the sample's line in index.jsonl, with null for NaN and infinities."""
        row: dict[str, Any] = {"index": self.index, "prompt": self.prompt, "reward": finite_or_none(self.reward)}
        if self.scores:
            row["scores"] = {name: finite_or_none(score) for name, score in self.scores.items()}
        if self.ground_truth is not None:
            row["ground_truth"] = self.ground_truth
        if self.truncated:
            row["truncated"] = True
        return row | (self.conversation or {})


def spoken(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The role (for a tool, with its name) and text of each message; tool calls follow the text, one per line."""
    lines = []
    for message in messages:
        parts = [message.get("reasoning_content"), message.get("content")]
        for call in message.get("tool_calls") or []:
            function = call.get("function", call)  # data and environments may have either form
            arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
            parts.append(f"{function.get('name')}({arguments})")
        role = f"{message['role']} {message.get('name') or ''}".rstrip()
        lines.append((role, "\n".join(str(part) for part in parts if part)))
    return lines


def storable(value: Any) -> Any:
    """Convert values of a model or an environment to strict JSON; whatever JSON cannot represent becomes text."""
    if isinstance(value, dict):
        return {storable(str(name)): storable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [storable(part) for part in value]
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value).encode("utf-8", "replace").decode()


def as_text(messages: Sequence[dict[str, Any]]) -> str:
    """Format a conversation as text."""
    return "\n\n".join(f"{role}: {text}" for role, text in spoken(messages))


def summary(conversation: dict[str, Any]) -> str:
    """Summarize a conversation: `3 turns; 2 calls; 0.12 s in the environment; rewards 0, 0, 1; ended: done`."""
    parts = [counted(conversation["turns"], "turn"), counted(conversation["tool_calls"], "call")]
    if conversation.get("environment_seconds", 0) >= 0.001:  # an evaluation keeps none: its records are reproducible
        parts.append(f"{conversation['environment_seconds']:.2g} s in the environment")
    rewards = [f"{reward:.4g}" for reward in conversation["turn_rewards"]]
    if rewards:
        parts.append(f"rewards {', '.join(rewards)}")
    return "; ".join([*parts, f"ended: {conversation['ended']}"])


def finite_or_none(value: float) -> float | None:
    """The number for strict JSON: None for NaN and infinities."""
    return value if math.isfinite(value) else None


def kind_of(records: Sequence[Record]) -> str:
    """The folder of a run for these records, which are all of one kind within a validation."""
    return SAMPLES if records and isinstance(records[0].output, str) else IMAGES


# -- the files --------------------------------------------------------------------------------------------------------


def save_records(run_folder: Path, step: int, set_name: str, rows: list[Record]) -> Path:
    """Write the samples of one validation and return their folder, such as `run_folder/images/<set>/step_000010`.

    Its `index.jsonl` contains, in the order of `rows`, `index`, `prompt`, `reward` (null if not finite), `file` or
    `text`, and if present `scores`, `ground_truth`, `truncated`, `images` and the keys of CONVERSATION. Beside it are
    `00003.png` for index 3, and `grid.png`; for videos also `00003.mp4`, called `video` in the index, and `grid.mp4`.
    The folder is written elsewhere and moved into place when complete, replacing an older one.
    """
    assert len({record.index for record in rows}) == len(rows), "two records have one index"
    kind = kind_of(rows)
    if not set_name or set_name in (".", "..") or "/" in set_name:
        raise ValueError(f"{kind}: {set_name!r} cannot name a validation set's folder; use a name without '/'")
    final = run_folder / kind / set_name / f"step_{step:06d}"
    partial = final.with_name(final.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if kind == SAMPLES:
            _write_texts(partial, rows)
        else:
            _write_pictures(partial, rows)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)  # free the space on a full disk
        raise
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    return final


def _write_texts(folder: Path, rows: list[Record]) -> None:
    lines = []
    for record in rows:
        line = record.row() | {"text": record.output}
        for shown in record.images:
            if not (folder / shown.file).exists():
                Image.fromarray(shown.pixels).save(folder / shown.file)
            of_image = {"file": shown.file, "place": shown.place, "height": shown.height, "width": shown.width}
            line.setdefault("images", []).append(of_image)
        lines.append(line)
    write_index(folder, lines)


def _write_pictures(folder: Path, rows: list[Record]) -> None:
    lines = []
    for record in rows:
        line = record.row() | {"file": f"{record.stem}.png"}
        side_by_side(pictures(standing(record.frames))).save(folder / line["file"])
        if record.is_video:
            line["video"] = f"{record.stem}.mp4"
            write_video(folder / line["video"], record.frames, record.fps)
        lines.append(line)
    write_index(folder, lines)
    if rows:
        grid(rows).save(folder / "grid.png")
    if rows and rows[0].is_video:
        write_video(folder / "grid.mp4", moving_grid(rows), rows[0].fps)


def together(images: Sequence[Thumbnail]) -> Image.Image:
    """Place the images of a prompt side by side."""
    return side_by_side([Image.fromarray(image.pixels) for image in images])


def write_index(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write a folder's `index.jsonl`."""
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    write_inside(folder, "index.jsonl", "".join(lines))


def read_index(folder: Path, content: str = "file") -> list[dict[str, Any]]:
    """The rows of a folder's `index.jsonl`; empty if there is no such file. Raises ValueError for an invalid row.

    `content`: the key that every row must have besides index, prompt and reward, "file" or "text".
    """
    rows = []
    try:
        with open_inside(folder, "index.jsonl") as file:
            for number, line in enumerate(file, start=1):
                row = json_object(line)
                if row is None or not _is_row(row, content):
                    place = f"{folder / 'index.jsonl'}:{number}"
                    raise ValueError(f"{place}: not a row with index, prompt, reward and {content}")
                rows.append(row)
    except FileNotFoundError:
        return []
    return rows


def _is_row(row: dict[str, Any], content: str) -> bool:
    """Whether a row has the keys and types that readers rely on; the file may be damaged or written by others."""
    if not row.keys() >= {"index", "prompt", "reward", content}:
        return False
    has_words = isinstance(row["prompt"], str) and isinstance(row[content], str)
    has_reward = row["reward"] is None or isinstance(row["reward"], int | float)
    return has_words and has_reward and ("messages" not in row or row.keys() >= set(CONVERSATION))


# -- the grid ---------------------------------------------------------------------------------------------------------


def grid(records: Sequence[Record]) -> Image.Image:
    """A roughly square grid of all images, each with its reward and prompt below it."""
    return _frame_grid(records, [standing(record.frames) for record in records])


def shown_grid(records: Sequence[Record]) -> Image.Image | None:
    """A grid of the images in the prompts of texts, with reward, prompt and answer below; None if there are none."""
    seen = [record for record in records if record.images]
    if not seen:
        return None
    tiles = [fit(together(record.images)) for record in seen]
    answered = [replace(record, prompt=f"{record.prompt} -> {record.output}") for record in seen]
    return _record_sheet(answered, tiles, math.ceil(math.sqrt(len(tiles))))


def moving_grid(records: Sequence[Record]) -> Iterator[NDArray[np.uint8]]:
    """The frames, uint8 [H, W, 3], of a grid of videos that have the same length."""
    for at_once in zip(*(record.frames for record in records), strict=True):
        yield np.asarray(_frame_grid(records, [frame[None] for frame in at_once]))


def _frame_grid(records: Sequence[Record], strips: Sequence[NDArray[np.uint8]]) -> Image.Image:
    """A grid whose tiles show the frames strips[i] [f, H, W, 3] of each record side by side."""
    tiles = [side_by_side(list(map(fit, pictures(strip)))) for strip in strips]
    columns = math.ceil(math.sqrt(len(tiles) / len(strips[0])))  # each tile is f times as wide as a frame
    return _record_sheet(records, tiles, columns)


def _record_sheet(records: Sequence[Record], tiles: Sequence[Image.Image], columns: int) -> Image.Image:
    """Arrange tiles on one sheet, each with the reward and prompt of its record."""
    prompts, headings = [], []
    for record in records:
        prompts.append(record.prompt)
        headings.append(f"reward {record.reward:.3f}")
    return sheet(tiles, prompts, columns, headings)
