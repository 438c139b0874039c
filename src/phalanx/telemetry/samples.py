"""The validation samples in the report: the same prompts at several steps or in several runs, and the best and worst.

Each side of a card shows its last step; its other steps are in <template>s, which page/report.js swaps in. Without
JavaScript, a browser shows the last steps.
"""

import base64
import io
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from phalanx.functional.frames import evenly_spaced
from phalanx.media.grids import STRIP
from phalanx.telemetry.records import IMAGES, SAMPLES, read_index, spoken, summary
from phalanx.telemetry.run_folder import Run, inside, is_inside

CONTENT = {IMAGES: "file", SAMPLES: "text"}  # the key of the sample in an index.jsonl, by the run's folder
MAX_CARDS = 24
MAX_SAMPLES = 300  # per page: about 15 MB of JPEGs
MAX_VIDEO_BYTES = 16 << 20  # per page; if the mp4s are larger in total, the page shows some of their frames instead
BEST = 4  # at most this many best samples, and as many worst ones
INLINE_SIDE = 512  # pixels; larger images are scaled down before they are inlined
CARD_SIDE = 256  # maximum width of an image on a card, in pixels; a click enlarges it
TINY_SIDE = 128  # images up to this side are magnified by an integer, without smoothing

Key = tuple[int, str]  # a sample's index and prompt: equal keys at different steps mean the same prompt and noise


@dataclass(frozen=True)
class Kept:
    """The saved samples of one validation set of a run: the rows of each step's index.jsonl, and their folder."""

    run: Run
    folder: Path
    steps: dict[int, dict[Key, dict[str, Any]]]

    @property
    def first(self) -> int:
        return min(self.steps)

    @property
    def last(self) -> int:
        return max(self.steps)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"


def samples_html(runs: Sequence[Run]) -> str:
    """The HTML section with the samples of all runs."""
    title = "Held-out prompts" if runs[0].label else "Held-out prompts, before and after"
    parts = []
    for kind in CONTENT:
        sets: dict[str, list[Kept]] = {}
        for run in runs:
            for path in (run.folder / kind).glob("*"):
                kept = _read(run, path)
                if kept.steps:
                    sets.setdefault(path.name, []).append(kept)
        for name in sorted(sets):
            parts.append(_set(sets[name], share=len(sets)))
    none = "No validation samples were kept (trainer.log_val_generations, images/ or samples/)."
    parts = parts or [notes_html([none])]
    hint = ""
    if any((run.folder / IMAGES).is_dir() for run in runs):
        hint = '<p class="n" hidden>Click an image to enlarge it; click again for the next one on its card.</p>'
    return f"<section><h2>{title}</h2>{hint}{''.join(parts)}</section>"


def notes_html(notes: Sequence[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _read(run: Run, folder: Path) -> Kept:
    steps = {}
    for path in folder.glob("step_*"):
        # the folder may contain samples of an older run, from steps that this run has not reached
        reached = path.name[5:].isdecimal() and int(path.name[5:]) <= run.last_step()
        if reached and is_inside(run.folder, path / "index.jsonl"):
            rows = {(row["index"], row["prompt"]): row for row in read_index(path, CONTENT[folder.parent.name])}
            if rows:
                steps[int(path.name[5:])] = rows
    return Kept(run, folder, steps)


# --- the same prompts over steps ----------------------------------------------------------------------------------


def _set(kept: list[Kept], share: int) -> str:
    """The cards of a validation set with their slider, and its best and worst samples, on a page of `share` sets."""
    shared = list(kept[0].steps[kept[0].first])
    for each in kept:
        for rows in each.steps[each.first], each.steps[each.last]:
            shared = [key for key in shared if key in rows]
    keys = shared[:MAX_CARDS]
    room = max(2, MAX_SAMPLES // (share * len(kept) * max(1, len(keys))))
    sides = []
    for each in kept:
        steps = sorted(each.steps)
        sides.append((each, [steps[i] for i in evenly_spaced(len(steps), room)]))
    movies = _movies(sides, keys, share)
    notes = notes_html(_notes(sides, shared))
    first, steps = sides[0]
    if not first.run.label and len(steps) > 1:  # for a single run, show the first validation beside the later ones
        sides = [(first, steps[:1]), (first, steps[1:])]
    stops = set[int]().union(*(chosen for _, chosen in sides if len(chosen) > 1))
    html = (
        f'<section class="set"><h3>{escape(_heading(kept))}</h3>{notes}{_slider(sorted(stops))}'
        f'<div class="cards {first.folder.parent.name}" style="--w:{_width(first, keys)}px;--n:{len(sides)}">'
    )
    for key in keys:
        html += f'<figure>{_caption(first, steps[-1], key)}<div class="pair">'
        for each, chosen in sides:
            html += _side(each, chosen, key, movies)
        html += "</div></figure>"
    html += "</div></section>"
    for each in kept:
        html += _extremes(each, movies)
    return html


def _heading(kept: list[Kept]) -> str:
    steps = set[int]().union(*(each.steps for each in kept))
    first, last = min(steps), max(steps)
    between = f"step {first}" if first == last else f"step {first} to {last}"
    return f"{kept[0].folder.name}: {between}"


def _notes(sides: list[tuple[Kept, list[int]]], shared: list[Key]) -> list[str]:
    notes, kept = [], sides[0][0]
    if len(sides) == 1 and len(kept.steps) == 1:
        notes.append(
            f"Only the validation of step {kept.first} kept {kept.folder.parent.name}: nothing to compare with yet."
        )
    for each, chosen in sides:
        if len(chosen) < len(each.steps):
            notes.append(f"{len(chosen)} of {len(each.steps)} validations are shown.")
    if len(shared) > MAX_CARDS:
        notes.append(f"{MAX_CARDS} of {len(shared)} prompts are shown.")
    if not shared:
        notes.append("The validations have no prompt in common.")
    return notes


def _slider(stops: list[int]) -> str:
    """A slider over these steps, which is hidden without JavaScript."""
    if len(stops) < 2:
        return ""
    last = len(stops) - 1
    return (
        f'<label class="slider" hidden>Step <input type="range" min="0" max="{last}" value="{last}" '
        f'data-steps="{",".join(map(str, stops))}"><output>{stops[-1]}</output></label>'
    )


def _side(kept: Kept, steps: list[int], key: Key, movies: bool) -> str:
    """A sample at the last of these steps, with templates of the other steps for the slider."""
    last, templates = max(step for step in steps if key in kept.steps[step]), ""
    for step in steps:
        if step != last and key in kept.steps[step]:
            templates += f'<template data-step="{step}">{_frame(kept, step, key, movies)}</template>'
    return f'<div class="side" data-step="{last}">{_frame(kept, last, key, movies)}{templates}</div>'


# --- the best and the worst ---------------------------------------------------------------------------------------


def _extremes(kept: Kept, movies: bool) -> str:
    """The samples of the last validation with the highest and the lowest reward."""
    rows = kept.steps[kept.last]
    scored = [key for key in rows if rows[key]["reward"] is not None]
    order = sorted(scored, key=lambda key: -rows[key]["reward"])
    count = min(BEST, len(order) // 4)  # so that at least half of the samples are in neither group
    if count == 0:
        return ""
    title = kept.run.titled(f"{kept.folder.name}: best and worst of the {len(order)} samples of step {kept.last}")
    width = _width(kept, order)
    html = f"<h3>{escape(title)}</h3><div class='extremes {kept.folder.parent.name}' style='--w:{width}px;--n:1'>"
    for word, keys in ("Best", order[:count]), ("Worst", order[: -count - 1 : -1]):
        html += f"<div><h4>{word}</h4><div class='cards few'>"
        for key in keys:
            side = f'<div class="side">{_frame(kept, kept.last, key, movies)}</div>'
            html += f"<figure>{_caption(kept, kept.last, key)}{side}</figure>"
        html += "</div></div>"
    return f"{html}</div>"


# --- one sample ---------------------------------------------------------------------------------------------------


def _frame(kept: Kept, step: int, key: Key, movies: bool) -> str:
    """A sample with its step, reward and scores."""
    folder, row = kept.path(step), kept.steps[step][key]
    label = f"{kept.run.label} · {step}" if kept.run.label else f"Step {step}"
    reward = "no reward" if row["reward"] is None else f"{row['reward']:.3f}"
    alt = escape(f"{label}, reward {reward}: {row['prompt']}")
    if "text" in row:
        is_empty = not row["text"].strip() and "messages" not in row
        sample = '<p class="lost">(no text)</p>' if is_empty else f"<pre>{escape(row['text'])}</pre>"
        if "messages" in row:
            sample = _talk(row)
        if is_empty:
            sample += '<span class="mark">empty</span>'
        if row.get("truncated"):
            sample += '<span class="mark">cut</span>'
    elif movies and "video" in row and (folder / row["video"]).is_file():
        source = _data_url("video/mp4", inside(kept.run.folder, folder / row["video"]).read_bytes())
        sample = f'<video controls loop muted playsinline aria-label="{alt}" src="{source}"></video>'
    else:
        try:
            sample = _image(inside(kept.run.folder, folder / row["file"]), alt)
        except OSError:
            sample = '<span class="lost">image file is missing or damaged</span>'
    caption = f'<div class="cap"><span>{escape(label)}</span><b>{escape(reward)}</b></div>'
    scores = row.get("scores", {})
    terms = [f"{name} {value:.4g}" for name, value in scores.items() if value is not None]
    if terms and list(scores.values()) != [row["reward"]]:  # omit a single term that equals the reward
        caption += f"<p class=n>{escape(' · '.join(terms))}</p>"
    return f'<div class="frame">{sample}{caption}</div>'


def _talk(row: dict[str, Any]) -> str:
    """A conversation, message by message, and its summary."""
    html = '<div class="talk">'
    for role, text in spoken(row["messages"]):
        html += f'<div class="said {"own" if role == "assistant" else ""}"><span>{escape(role)}</span>'
        html += f"<pre>{escape(text)}</pre></div>"
    return f"{html}</div><p class=n>{escape(summary(row))}</p>"


def _caption(kept: Kept, step: int, key: Key) -> str:
    """The prompt with its images, and its ground truth if the data contains one."""
    row, shown = kept.steps[step][key], ""
    for image in row.get("images", []):
        title = f"{image['place']}, {image['width']} x {image['height']} pixels"
        try:
            shown += _image(inside(kept.run.folder, kept.path(step) / image["file"]), escape(title))
        except OSError:
            shown += '<span class="lost">image file is missing or damaged</span>'
    shown = f'<div class="shown">{shown}</div>' if shown else ""
    truth = f"<p class=n>ground truth: {escape(str(row['ground_truth']))}</p>" if "ground_truth" in row else ""
    return f"<figcaption>{shown}{escape(row['prompt'])}{truth}</figcaption>"


def _width(kept: Kept, keys: Sequence[Key]) -> int:
    """The width of the images on cards in pixels: their own, or a multiple for tiny ones, but at most CARD_SIDE."""
    width = CARD_SIDE
    if keys and kept.folder.parent.name == IMAGES:
        row = kept.steps[kept.last][keys[0]]
        with suppress(OSError), Image.open(kept.path(kept.last) / row["file"]) as image:
            width = image.width // (STRIP if "video" in row else 1)  # the image of a video shows several frames
    return min(width * math.ceil(TINY_SIDE / width), CARD_SIDE)


def _movies(sides: list[tuple[Kept, list[int]]], keys: list[Key], share: int) -> bool:
    """Whether the videos of these steps are small enough to be embedded in the page."""
    total = 0
    for kept, steps in sides:
        for step, key in itertools.product(steps, keys):
            row = kept.steps[step].get(key, {})
            path = kept.path(step) / row.get("video", "")
            total += path.stat().st_size if "video" in row and path.is_file() else 0
    return total <= MAX_VIDEO_BYTES // share


def _image(path: Path, alt: str) -> str:
    """An <img> with the embedded file, which is converted to a smaller JPEG if it is large."""
    with Image.open(path) as image:
        width, height = image.size
        kind, data = "png", path.read_bytes()
        if max(width, height) > INLINE_SIDE:
            scaled = image.convert("RGB")
            scaled.thumbnail((INLINE_SIDE, INLINE_SIDE), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            scaled.save(buffer, "JPEG", quality=88)
            kind, data = "jpeg", buffer.getvalue()
    pixels = " class='pixels'" if max(width, height) <= TINY_SIDE else ""
    size = f'width="{width}" height="{height}"'
    return f'<img{pixels} tabindex="0" {size} alt="{alt}" src="{_data_url(f"image/{kind}", data)}">'


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
