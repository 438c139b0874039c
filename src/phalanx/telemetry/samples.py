"""The validation samples of the report: the same prompts over steps, or in several runs, and the best and the worst.

What a side shows at other steps than the last waits in <template>s, which page/report.js puts in its place: a browser
without scripts shows the last ones.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from phalanx.functional.frames import evenly_spaced
from phalanx.telemetry.records import IMAGES, SAMPLES, read_index
from phalanx.telemetry.run_folder import Run

CONTENT = {IMAGES: "file", SAMPLES: "text"}  # what an index.jsonl has in the folders of a run
MAX_CARDS = 24
MAX_SAMPLES = 300  # in a page: 10 MB of JPEGs
MAX_VIDEO_BYTES = 16 << 20  # of a page's mp4s; if they are more, their pictures stand for them
BEST = 4  # at most so many of the best, and of the worst
INLINE_SIDE = 384  # pixels of an inlined image; larger ones are scaled down

Key = tuple[int, str]  # a sample's index and prompt: the same prompt and noise at each step


@dataclass(frozen=True)
class Kept:
    """What a run kept of one validation set: the rows of each step's index.jsonl, and where they lie."""

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
    """The section of the samples."""
    title = "Held-out prompts" if runs[0].label else "Held-out prompts, before and after"
    parts = []
    for kind in CONTENT:
        names = {path.name for run in runs for path in (run.folder / kind).glob("*") if path.is_dir()}
        sets = [[_read(run, kind, name) for run in runs] for name in sorted(names)]
        sets = [[kept for kept in each if kept.steps] for each in sets]
        sets = [each for each in sets if each]
        parts += [_set(each, share=len(sets)) for each in sets]
    none = "No validation samples were kept (trainer.log_val_generations, images/ or samples/)."
    parts = parts or [notes_html([none])]
    return f"<section><h2>{title}</h2>{''.join(parts)}</section>"


def notes_html(notes: Sequence[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _read(run: Run, kind: str, name: str) -> Kept:
    folder, steps = run.folder / kind / name, {}
    for path in folder.glob("step_*"):
        # a folder that was used before may hold samples of steps that this run has not reached
        if path.name[5:].isdecimal() and int(path.name[5:]) <= run.last_step():
            rows = read_index(path, CONTENT[kind])
            if rows:
                steps[int(path.name[5:])] = {(row["index"], row["prompt"]): row for row in rows}
    return Kept(run, folder, steps)


# --- the same prompts over steps ----------------------------------------------------------------------------------


def _set(kept: list[Kept], share: int) -> str:
    """The cards of a validation set with their slider, and its best and worst samples; `share` sets share the page."""
    ends = [rows for each in kept for rows in (each.steps[each.first], each.steps[each.last])]
    shared = [key for key in ends[0] if all(key in rows for rows in ends)]
    keys = shared[:MAX_CARDS]
    room = max(2, MAX_SAMPLES // (share * len(kept) * max(1, len(keys))))
    steps = [_chosen(sorted(each.steps), room) for each in kept]
    movies = _movies([(each, step) for each, chosen in zip(kept, steps, strict=True) for step in chosen], keys, share)
    sides = list(zip(kept, steps, strict=True))
    if not kept[0].run.label and len(steps[0]) > 1:  # of the only run, the first validation stays beside the others
        sides = [(kept[0], steps[0][:1]), (kept[0], steps[0][1:])]
    cards = []
    for key in keys:
        pair = "".join(_side(each, chosen, key, movies) for each, chosen in sides)
        cards.append(f'<figure><div class="pair">{pair}</div>{_caption(kept[0].steps[steps[0][-1]][key])}</figure>')
    stops = sorted({step for _, chosen in sides if len(chosen) > 1 for step in chosen})
    notes = notes_html(_notes(kept, steps, shared))
    return (
        f'<section class="set"><h3>{escape(_heading(kept))}</h3>{notes}{_slider(stops)}'
        f'<div class="cards {kept[0].folder.parent.name}">{"".join(cards)}</div></section>'
        + "".join(_extremes(each, movies) for each in kept)
    )


def _chosen(steps: list[int], room: int) -> list[int]:
    return [steps[i] for i in evenly_spaced(len(steps), room)]


def _heading(kept: list[Kept]) -> str:
    first, last = min(each.first for each in kept), max(each.last for each in kept)
    between = f"step {first}" if first == last else f"step {first} to {last}"
    return f"{kept[0].folder.name}: {between}"


def _notes(kept: list[Kept], steps: list[list[int]], shared: list[Key]) -> list[str]:
    notes, kind = [], kept[0].folder.parent.name
    if len(kept) == 1 and len(kept[0].steps) == 1:
        notes.append(f"Only the validation of step {kept[0].first} kept {kind}: nothing to compare with yet.")
    for each, chosen in zip(kept, steps, strict=True):
        if len(chosen) < len(each.steps):
            notes.append(f"{len(chosen)} of {len(each.steps)} validations are shown.")
    if len(shared) > MAX_CARDS:
        notes.append(f"{MAX_CARDS} of {len(shared)} prompts are shown.")
    if not shared:
        notes.append("The validations share no prompt.")
    return notes


def _slider(stops: list[int]) -> str:
    """A slider over these steps; the script shows it."""
    if len(stops) < 2:
        return ""
    last = len(stops) - 1
    return (
        f'<label class="slider" hidden>Step <input type="range" min="0" max="{last}" value="{last}" '
        f'data-steps="{",".join(map(str, stops))}"><output>{stops[-1]}</output></label>'
    )


def _side(kept: Kept, steps: list[int], key: Key, movies: bool) -> str:
    """A sample at the last of these steps, and for the slider at the others."""
    frames = {step: _frame(kept, step, key, movies) for step in steps if key in kept.steps[step]}
    last = max(frames)
    waiting = "".join(f'<template data-step="{step}">{frames[step]}</template>' for step in frames if step != last)
    return f'<div class="side" data-step="{last}">{frames[last]}{waiting}</div>'


# --- the best and the worst ---------------------------------------------------------------------------------------


def _extremes(kept: Kept, movies: bool) -> str:
    """The samples of the last validation with the highest and the lowest reward."""
    rows = kept.steps[kept.last]
    order = sorted((key for key in rows if rows[key]["reward"] is not None), key=lambda key: -rows[key]["reward"])
    count = min(BEST, len(order) // 4)  # of few samples all would be one or the other
    if count == 0:
        return ""
    groups = []
    for word, keys in ("Best", order[:count]), ("Worst", order[: -count - 1 : -1]):
        cards = ""
        for key in keys:
            side = f'<div class="side">{_frame(kept, kept.last, key, movies)}</div>'
            cards += f"<figure>{side}{_caption(rows[key])}</figure>"
        groups.append(f"<div><h4>{word}</h4><div class='cards few'>{cards}</div></div>")
    title = kept.run.titled(f"{kept.folder.name}: best and worst of the {len(order)} samples of step {kept.last}")
    return f"<h3>{escape(title)}</h3><div class='extremes {kept.folder.parent.name}'>{''.join(groups)}</div>"


# --- one sample ---------------------------------------------------------------------------------------------------


def _frame(kept: Kept, step: int, key: Key, movies: bool) -> str:
    """A sample with its step, reward and scores."""
    folder, row = kept.path(step), kept.steps[step][key]
    label = f"{kept.run.label} · {step}" if kept.run.label else f"Step {step}"
    reward = "no reward" if row["reward"] is None else f"{row['reward']:.3f}"
    alt = escape(f"{label}, reward {reward}: {row['prompt']}")
    if "text" in row:
        sample = f"<pre>{escape(row['text'])}</pre>"
    elif movies and "video" in row and (folder / row["video"]).is_file():
        source = _data_url("video/mp4", (folder / row["video"]).read_bytes())
        sample = f'<video controls loop muted playsinline aria-label="{alt}" src="{source}"></video>'
    else:
        try:
            sample = _image(folder / row["file"], alt)
        except OSError:
            sample = '<span class="lost">image file is missing or damaged</span>'
    caption = f'<div class="cap"><span>{escape(label)}</span><b>{escape(reward)}</b></div>'
    terms = row.get("scores", {})
    if list(terms.values()) == [row["reward"]]:
        terms = {}  # the only one says what the reward says
    scores = " · ".join(f"{name} {value:.4g}" for name, value in terms.items() if value is not None)
    return f'<div class="frame">{sample}{caption}{f"<p class=n>{escape(scores)}</p>" if scores else ""}</div>'


def _caption(row: dict[str, Any]) -> str:
    """The prompt, and what its data says of the answer."""
    truth = f"<p class=n>ground truth: {escape(str(row['ground_truth']))}</p>" if "ground_truth" in row else ""
    return f"<figcaption>{escape(row['prompt'])}{truth}</figcaption>"


def _movies(shown: list[tuple[Kept, int]], keys: list[Key], share: int) -> bool:
    """True where the videos that would be shown are small enough to be in the page."""
    total = 0
    for kept, step in shown:
        for key in keys:
            row = kept.steps[step].get(key, {})
            path = kept.path(step) / row.get("video", "")
            total += path.stat().st_size if "video" in row and path.is_file() else 0
    return total <= MAX_VIDEO_BYTES // share


def _image(path: Path, alt: str) -> str:
    """An <img> with the file inside: as it is where small, else as a scaled JPEG."""
    with Image.open(path) as image:
        width, height = image.size
        kind, data = "png", path.read_bytes()
        if max(width, height) > INLINE_SIDE:
            scaled = image.convert("RGB")
            scaled.thumbnail((INLINE_SIDE, INLINE_SIDE), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            scaled.save(buffer, "JPEG", quality=88)
            kind, data = "jpeg", buffer.getvalue()
    pixels = " class='pixels'" if max(width, height) <= INLINE_SIDE // 2 else ""
    return f'<img{pixels} width="{width}" height="{height}" alt="{alt}" src="{_data_url(f"image/{kind}", data)}">'


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
