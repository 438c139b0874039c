"""The validation samples in the report: the same prompts at several steps or in several runs, and the best and worst.

Each side of a card shows its last step; its other steps are in <template>s, which page/report.js swaps in. Without
JavaScript, a browser shows the last steps.
"""

import base64
import io
import itertools
import math
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from PIL import Image

from phalanx.config.inside import list_inside, open_inside, read_inside, status_inside
from phalanx.config.messages import MOST_SHOWN, counted, cut
from phalanx.functional.frames import evenly_spaced
from phalanx.media.grids import STRIP
from phalanx.run.telemetry.run_folder import Run
from phalanx.telemetry.records import IMAGES
from phalanx.tools.board.kept_samples import CONTENT, Kept, Key, Sample
from phalanx.tools.board.markup import html_details, notes_html

MAX_CARDS, MAX_TEXT_CARDS = 24, 400  # of a set of images, and of texts
MAX_SAMPLES, MAX_TEXTS = 300, 4000  # per page: about 15 MB of JPEGs, or less of texts
UNFOLDED = 8  # cards of a set that are shown at once; the others can be unfolded
MAX_SETS = 1000  # per page
MAX_VIDEO_BYTES = 16 << 20  # per page; if the mp4s are larger in total, the page shows some of their frames instead
BEST = 4  # at most this many best samples, and as many worst ones
INLINE_SIDE = 512  # pixels; larger images are scaled down before they are inlined
CARD_SIDE = 256  # maximum width of an image on a card, in pixels; a click enlarges it
TINY_SIDE = 128  # images up to this side are magnified by an integer, without smoothing
MOST_PIXELS = 1 << 25  # of an image that is decoded: four frames of 4K side by side
MOST_IMAGE_BYTES = 1 << 26
MOST_HTML = 64 << 20  # characters of the samples on a page
MOST_TEXT = 300_000  # characters of a response, and of a prompt
MOST_SCALED = 400  # images that are kept scaled
LOST = '<span class="lost">image file is missing or damaged</span>'
FULL = '<span class="lost">not shown: the page is full</span>'
SEARCH = (
    '<label class="search" hidden>Search <input type="search" placeholder="words in prompts and samples">'
    '<output class="n"></output></label>'
)
DAMAGED = '<span class="lost">damaged</span>'


@dataclass
class Room:
    """The room for samples that is left on a page, in characters, and images that were scaled for an earlier one."""

    left: int = MOST_HTML
    scaled: dict[tuple[int, ...], bytes] = field(default_factory=dict)

    def take(self, html: str) -> str:
        """The HTML of a part of a sample, or a note in its place if the page is full."""
        if len(html) > self.left:
            return FULL
        self.left -= len(html)
        return html


def samples_html(runs: Sequence[Run], room: Room | None = None) -> str:
    """The HTML section with the samples of all runs."""
    room = room or Room()
    title = "Held-out prompts" if runs[0].label else "Held-out prompts, before and after"
    parts = []
    for kind in CONTENT:
        sets: dict[str, list[Run]] = {}
        for run in runs:
            for name, is_folder in list_inside(run.folder, kind):
                if is_folder:
                    sets.setdefault(name, []).append(run)
        for name in sorted(sets)[:MAX_SETS]:
            kept = [kept for kept in (Kept(run, kind, name) for run in sets[name]) if kept.steps]
            if kept:
                parts.append(_set_cards(kept, len(sets), room))
    none = "No validation samples were kept (trainer.log_val_generations, images/ or samples/)."
    parts = parts or [notes_html([none])]
    hint = ""
    if any(status_inside(run.folder, IMAGES) for run in runs):
        hint = '<p class="n" hidden>Click an image to enlarge it; click again for the next one on its card.</p>'
    return f"<section><h2>{title}</h2>{SEARCH}{hint}{''.join(parts)}</section>"


def folded_cards(cards: Sequence[str], attributes: str) -> str:
    """The cards; those after the first few are folded, so that what follows on the page is not far away."""
    html = f"<div {attributes}>{''.join(cards[:UNFOLDED])}</div>"
    if len(cards) > UNFOLDED:
        title = counted(len(cards) - UNFOLDED, "more prompt")
        html += html_details(title, f"<div {attributes}>{''.join(cards[UNFOLDED:])}</div>")
    return html


def _escape_text(text: str, most: int = MOST_TEXT) -> str:
    """A text for HTML, cut if it is long. Python stores a text with a character beyond U+FFFF, such as an emoji, in
    4 bytes per character, so that the whole page would take four times its size: they are written as numbers.
    """
    return re.sub("[\U00010000-\U0010ffff]", lambda match: f"&#{ord(match[0])};", escape(cut(text, most)))


# --- the same prompts over steps ----------------------------------------------------------------------------------


def _set_cards(kept: list[Kept], share: int, room: Room) -> str:
    """The cards of a validation set with their slider, and its best and worst samples, on a page of `share` sets."""
    shared = list(kept[0].rows[kept[0].first])
    for each in kept:
        for rows in each.rows[each.first], each.rows[each.last]:
            shared = [key for key in shared if key in rows]
    most, samples = (MAX_CARDS, MAX_SAMPLES) if kept[0].kind == IMAGES else (MAX_TEXT_CARDS, MAX_TEXTS)
    keys = shared[:most]
    count = max(2, samples // (share * len(kept) * max(1, len(keys))))
    sides, ends = [], [_extreme_keys(each) for each in kept]
    for each in kept:
        sides.append((each, [each.steps[i] for i in evenly_spaced(len(each.steps), count)]))
    notes = notes_html(_set_notes(sides, shared, len(keys)))
    for (each, chosen), (_, best, worst) in zip(sides, ends, strict=True):
        each.keep(chosen, [*keys, *best, *worst])
    movies = _has_video_room(sides, keys, share)
    first, steps = sides[0]
    if not first.run.label and len(steps) > 1:  # for a single run, show the first validation beside the later ones
        sides = [(first, steps[:1]), (first, steps[1:])]
    stops = set[int]().union(*(chosen for _, chosen in sides if len(chosen) > 1))
    cards = []
    for key in keys:
        card = f'<figure>{_prompt_caption(first, steps[-1], key, room)}<div class="pair">'
        for each, chosen in sides:
            card += _sample_steps(each, chosen, key, movies, room)
        cards.append(f"{card}</div></figure>")
    look = f'class="cards {first.kind}" style="--w:{_card_width(first, keys)}px;--n:{len(sides)}"'
    html = (
        f'<section class="set"><h3>{escape(_set_heading(kept))}</h3>{notes}'
        f"{_step_slider(sorted(stops), [] if first.run.label else steps)}{folded_cards(cards, look)}</section>"
    )
    for each, end in zip(kept, ends, strict=True):
        html += _extreme_samples(each, *end, movies, room)
    return html


def _set_heading(kept: list[Kept]) -> str:
    steps = set[int]().union(*(each.steps for each in kept))
    first, last = min(steps), max(steps)
    between = f"step {first}" if first == last else f"step {first} to {last}"
    return f"{kept[0].name}: {between}"


def _set_notes(sides: list[tuple[Kept, list[int]]], shared: list[Key], cards: int) -> list[str]:
    notes, kept = [], sides[0][0]
    if len(sides) == 1 and len(kept.steps) == 1:
        notes.append(f"Only the validation of step {kept.first} kept {kept.kind}: nothing to compare with yet.")
    for each, chosen in sides:
        if len(chosen) < len(each.steps):
            notes.append(f"{len(chosen)} of {len(each.steps)} validations are shown.")
        for step in sorted({each.first, each.last}):
            if each.damaged(step):
                notes.append(f"{counted(each.damaged(step), 'line')} of {each.folders[step]}/index.jsonl: damaged.")
    if len(shared) > cards:
        notes.append(f"{cards} of {len(shared)} prompts are shown.")
    if not shared:
        notes.append("The validations have no prompt in common.")
    return notes


def _step_slider(stops: list[int], steps: list[int]) -> str:
    """A slider over these steps, and for a single run a choice among its `steps` of the one that stands beside it; both
    are hidden without JavaScript.
    """
    if len(stops) < 2:
        return ""
    last, beside = len(stops) - 1, ""
    for step in steps:
        beside += f"<option>{step}</option>"
    if beside:
        beside = f'<label class="slider beside" hidden>beside step <select>{beside}</select></label>'
    return (
        f'<label class="slider" hidden>Step <input type="range" min="0" max="{last}" value="{last}" '
        f'data-steps="{",".join(map(str, stops))}"><output>{stops[-1]}</output></label>{beside}'
    )


def _sample_steps(kept: Kept, steps: list[int], key: Key, movies: bool, room: Room) -> str:
    """A sample at the last of these steps, with templates of the other steps for the slider."""
    last, templates = max(step for step in steps if key in kept.rows[step]), ""
    for step in steps:
        if step != last and key in kept.rows[step]:
            templates += f'<template data-step="{step}">{_sample_frame(kept, step, key, movies, room)}</template>'
    return f'<div class="side" data-step="{last}">{_sample_frame(kept, last, key, movies, room)}{templates}</div>'


# --- the best and the worst ---------------------------------------------------------------------------------------


def _extreme_keys(kept: Kept) -> tuple[int, list[Key], list[Key]]:
    """Of the last validation, the number of samples with a reward, and those with the highest and the lowest one."""
    rewards = {key: sample.reward for key, sample in kept.rows[kept.last].items() if sample.reward is not None}
    order = sorted(rewards, key=lambda key: -rewards[key])
    count = min(BEST, len(order) // 4)  # so that at least half of the samples are in neither group
    return len(order), order[:count], order[: -count - 1 : -1]


def _extreme_samples(kept: Kept, number: int, best: list[Key], worst: list[Key], movies: bool, room: Room) -> str:
    """The samples of the last validation with the highest and the lowest reward, of `number`."""
    if not best:
        return ""
    title = kept.run.titled(f"{kept.name}: best and worst of the {number} samples of step {kept.last}")
    width = _card_width(kept, best)
    html = f"<h3>{escape(title)}</h3><div class='extremes {kept.kind}' style='--w:{width}px;--n:1'>"
    for word, keys in ("Best", best), ("Worst", worst):
        html += f"<div><h4>{word}</h4><div class='cards few'>"
        for key in keys:
            side = f'<div class="side">{_sample_frame(kept, kept.last, key, movies, room)}</div>'
            html += f"<figure>{_prompt_caption(kept, kept.last, key, room)}{side}</figure>"
        html += "</div></div>"
    return f"{html}</div>"


# --- one sample ---------------------------------------------------------------------------------------------------


def _sample_frame(kept: Kept, step: int, key: Key, movies: bool, room: Room) -> str:
    """A sample with its step, reward and scores."""
    sample = kept.rows[step][key]
    label = f"{kept.run.label} · {step}" if kept.run.label else f"Step {step}"
    reward = "no reward" if sample.reward is None else f"{sample.reward:.3f}"
    alt = _escape_text(f"{label}, reward {reward}: {key[1]}", MOST_SHOWN)
    if sample.damaged:
        html = DAMAGED
    elif sample.text is not None:
        html = sample_text(sample)
    else:
        html = _sample_video(kept, step, sample, alt) if movies else ""
        html = html or image_html(kept.run.folder, f"{kept.folders[step]}/{sample.file}", alt, room)
    caption = f'<div class="cap"><span>{escape(label)}</span><b>{escape(reward)}</b></div>'
    terms = [f"{name} {value:.4g}" for name, value in sample.scores.items() if value is not None]
    if terms and list(sample.scores.values()) != [sample.reward]:  # omit a single term that equals the reward
        caption += f"<p class=n>{_escape_text(' · '.join(terms))}</p>"
    return f'<div class="frame">{room.take(html)}{room.take(caption)}</div>'


def sample_text(sample: Sample) -> str:
    """The HTML of a text, or a conversation message by message with its summary."""
    response = sample.text or ""
    is_empty = not response.strip() and sample.talk is None
    html = '<p class="lost">(no text)</p>' if is_empty else f"<pre>{_escape_text(response)}</pre>"
    if sample.talk is not None:
        html, left = '<div class="talk">', MOST_TEXT
        talk = sample.talk
        if talk[:1] == [("user", sample.key[1])]:  # the card has the prompt
            talk = talk[1:]
        for number, (role, text) in enumerate(talk):
            if left <= 0:
                html += f"<p class=n>{counted(len(talk) - number, 'more message')}</p>"
                break
            html += f'<div class="said {"own" if role == "assistant" else ""}">'
            html += f"<span>{_escape_text(role, MOST_SHOWN)}</span><pre>{_escape_text(text, left)}</pre></div>"
            left -= len(text) + MOST_SHOWN  # the markup counts as well
        html += f"</div><p class=n>{_escape_text(sample.summary)}</p>"
    if is_empty:
        html += '<span class="mark">empty</span>'
    if sample.truncated:
        html += '<span class="mark">cut</span>'
    return html


def _sample_video(kept: Kept, step: int, sample: Sample, alt: str) -> str:
    """The <video> of a sample; empty if it has none that can be read."""
    if sample.video is None:
        return ""
    try:
        data = read_inside(kept.run.folder, f"{kept.folders[step]}/{sample.video}", MAX_VIDEO_BYTES)
    except OSError:
        return ""
    return f'<video controls loop muted playsinline aria-label="{alt}" src="{data_url("video/mp4", data)}"></video>'


def _prompt_caption(kept: Kept, step: int, key: Key, room: Room) -> str:
    """The prompt with its images, and its ground truth if the data contains one."""
    sample, shown = kept.rows[step][key], ""
    for file, title in sample.images[:MAX_CARDS]:
        shown += room.take(
            image_html(kept.run.folder, f"{kept.folders[step]}/{file}", _escape_text(title, MOST_SHOWN), room)
        )
    shown = f'<div class="shown">{shown}</div>' if shown else ""
    truth = "" if sample.truth is None else f"<p class=n>ground truth: {_escape_text(sample.truth)}</p>"
    return f"<figcaption>{shown}{room.take(_escape_text(key[1]) + truth)}</figcaption>"


def _card_width(kept: Kept, keys: Sequence[Key]) -> int:
    """The width of the images on cards in pixels: their own, or a multiple for tiny ones, but at most CARD_SIDE."""
    width = CARD_SIDE
    if keys and kept.kind == IMAGES:
        sample = kept.rows[kept.last][keys[0]]
        try:
            width, _ = _png_size(kept.run.folder, f"{kept.folders[kept.last]}/{sample.file}")
        except (OSError, ValueError):
            return CARD_SIDE
        width = max(width // (1 if sample.video is None else STRIP), 1)  # the image of a video shows several frames
    return min(width * math.ceil(TINY_SIDE / width), CARD_SIDE)


def _has_video_room(sides: list[tuple[Kept, list[int]]], keys: list[Key], share: int) -> bool:
    """Whether the videos of these steps are small enough to be embedded in the page."""
    total = 0
    for kept, steps in sides:
        for step, key in itertools.product(steps, keys):
            sample = kept.rows[step].get(key)
            if sample is not None and sample.video is not None:
                status = status_inside(kept.run.folder, f"{kept.folders[step]}/{sample.video}")
                total += 0 if status is None else status.st_size
    return total <= MAX_VIDEO_BYTES // share


def image_html(folder: Path, name: str, alt: str, room: Room) -> str:
    """An <img> with an embedded PNG file of a run, which is converted to a smaller JPEG if it is large."""
    try:
        width, height = _png_size(folder, name)
        if max(width, height) <= INLINE_SIDE and room.left > MOST_HTML // 2:
            kind, data = "png", read_inside(folder, name, 4 * INLINE_SIDE**2)
        else:
            kind, data = "jpeg", _scaled_image(folder, name, room)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # as PIL reports damaged files
        return LOST
    pixels = " class='pixels'" if max(width, height) <= TINY_SIDE else ""
    size = f'width="{width}" height="{height}"'
    return f'<img{pixels} tabindex="0" {size} alt="{alt}" src="{data_url(f"image/{kind}", data)}">'


def _png_size(folder: Path, name: str) -> tuple[int, int]:
    """Width and height of a PNG file, from its header. Raises ValueError for another file, or if it is too large."""
    with open_inside(folder, name) as file:
        head = file.read(24)
    if len(head) < 24 or not head.startswith(b"\x89PNG\r\n\x1a\n"):
        raise ValueError("not a PNG file")
    width, height = struct.unpack(">II", head[16:])
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"{width} x {height} pixels")
    return width, height


def _scaled_image(folder: Path, name: str, room: Room) -> bytes:
    """The file as a JPEG of at most INLINE_SIDE pixels."""
    with open_inside(folder, name) as file:
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if key in room.scaled:
            return room.scaled[key]
        if status.st_size > MOST_IMAGE_BYTES:
            raise ValueError("too many bytes")
        with Image.open(file, formats=["PNG"]) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError("too many pixels")
            scaled = image.convert("RGB")
    scaled.thumbnail((INLINE_SIDE, INLINE_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    scaled.save(buffer, "JPEG", quality=88)
    if len(room.scaled) == MOST_SCALED:
        room.scaled.clear()
    room.scaled[key] = buffer.getvalue()
    return room.scaled[key]


def data_url(kind: str, data: bytes) -> str:
    """A URL that contains the data."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
