"""Prompts: reading them from files."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phalanx.config.files import parse_json
from phalanx.data.files import FORMATS, LONGEST, DataError, Source, kind_of, locate, read, without_number
from phalanx.data.shown import COLUMNS
from phalanx.media.pictures import FORMS, Picture
from phalanx.types import Prompt

_QUOTED = re.compile(r'["“”„‟«]([^"“”„‟«»]+)["“”‟»]')
_PLACEHOLDER = re.compile(r"(Picture \d+: ?)?<image>")  # of the image in texts of VeRL-Omni, whose place is the model's
MARK = "<image>"  # of an image in texts of verl, for models that read images
_VIDEO, _VIDEOS = "<video>", ("videos", "video")  # its mark of a video, and columns of them


@dataclass(frozen=True)
class PromptRow:
    """A row of a data file; `meta` holds what a reward may need, `messages` a language model's whole chat, `images`
    those that it shows, `teacher` who is asked about it: see Prompt.
    """

    text: str
    negative: str | None
    meta: dict[str, Any]
    messages: list[dict[str, Any]] | None = None
    place: str = field(default="", compare=False)  # its key, file and line or row, for messages
    images: tuple[Picture, ...] = field(default=(), compare=False)
    teacher: str = ""


def load_prompts(
    files: list[str],
    key: str,
    images: Sequence[str] = (),
    prompt: str = "prompt",
    *,
    quoted: bool = True,
    answered: bool = False,
    image_key: str | None = None,
) -> list[PromptRow]:
    """All rows of all files, in order; `key` is the config key that lists them, for messages.

    `images` are columns that every row must have, as Pictures in `meta`: they are read when needed. `prompt` is the
    column of the prompts, in formats that have columns.

    - `.txt`: one prompt per line; blank lines are skipped.
    - `.jsonl`: one object per line, with `prompt` (text, or a chat) and optionally `negative_prompt`.
    - `.csv`: the same as columns, which the first line names; an empty cell is no value.
    - `.parquet` and Hugging Face datasets: the same as columns; VeRL-Omni's files need no changes.

    An entry may also be a folder or a pattern of such files. Of a chat (a list of `{role, content}`, a content being a
    text or parts `{type: text, text}`) the last user message is the prompt. All other columns go into `meta`;
    `meta["ground_truth"]` is, in this order, the column `ground_truth`, `reward_model.ground_truth`, with `quoted` the
    first span of the prompt in double quotes (straight or typographic), otherwise the column `answer`, or absent.
    Without `quoted`, for language models, a chat is kept whole, with its tool calls; it may end with the assistant's
    answer if `answered`. A file with the column `image_key` (None: `images`, or else `image`) has prompts with images,
    one or a list per row, or none: see Prompt. They are also `meta["images"]`, a tuple of Pictures. Their places are
    `<image>` in texts, or parts `{type: image}`; where there are neither, they come before the first user's text. Other
    columns of images are left out.

    Raises DataError for a file or row that cannot be used. Lines are counted from 1, rows from 0.
    """
    if not files:
        raise DataError(f"{key} is empty; give a list of files, each {FORMATS}")
    rows: list[PromptRow] = []
    for file in files:
        for place, source in _places(file, key):
            rows += _rows(source, f"{key}: {place}", images, prompt, quoted, answered, image_key)
    return rows


def _places(file: str, key: str) -> list[tuple[str, Source]]:
    """The files of an entry, with what messages call each."""
    sources = locate(file, key)
    places = []
    for path, split in sources:
        alone = split is not None or path == Path(file).expanduser()
        places.append((file if alone else str(path), (path, split)))
    return places


def _rows(
    source: Source, place: str, images: Sequence[str], prompt: str, quoted: bool, answered: bool, image_key: str | None
) -> list[PromptRow]:
    """The rows of one file."""
    path, split = source
    column = "prompt" if path.suffix == ".txt" else prompt
    rows = []
    for where, columns in read(path, split, place, images, prompt, texts=not quoted, image_key=image_key):
        rows.append(_row(columns, where, column, bool(images), quoted, answered))
    if not rows:
        raise DataError(f"{place} has no prompts")
    return rows


def validation_sets(
    files: list[str],
    limit: int | None = None,
    images: Sequence[str] = (),
    prompt: str = "prompt",
    *,
    quoted: bool = True,
    answered: bool = False,
    image_key: str | None = None,
) -> dict[str, list[Prompt]]:
    """The rows of each entry of `data.val_files`, at most `limit`, by the file's name without ending.

    A split of a folder is named `folder_split`. Files of a pattern are a set each, but for the parts of one. Sets that
    would have one name have that of their folder before it. `group_id` is the row's number. For the others see
    `load_prompts`.
    """
    key = "data.val_files"
    entries: list[_Set] = []
    for file in files:
        entries += _sets(file, key)
    counts = Counter(entry.name for entry in entries)
    sets: dict[str, list[Prompt]] = {}
    origin: dict[str, str] = {}
    for entry in entries:
        name = entry.name if counts[entry.name] == 1 else f"{entry.parent}_{entry.name}"
        if name in sets:
            raise DataError(
                f"{key}: {origin[name]} and {entry.file} would both be the validation set {name!r}; rename one of them"
            )
        origin[name] = entry.file
        rows: list[PromptRow] = []
        for place, source in entry.places:
            rows += _rows(source, f"{key}: {place}", images, prompt, quoted, answered, image_key)
        sets[name] = [numbered(row, i) for i, row in enumerate(rows[:limit])]
    return sets


@dataclass
class _Set:
    """A validation set: its name, that of the folder which it is in, the entry that lists it, and its files."""

    name: str
    parent: str
    file: str
    places: list[tuple[str, Source]]


def _sets(file: str, key: str) -> list[_Set]:
    """The validation sets of an entry."""
    places = _places(file, key)
    path = Path(file).expanduser()
    if path.exists():
        path = path if path.is_file() else path.resolve()
        return [_Set(path.stem if path.is_file() else path.name, path.resolve().parent.name, file, places)]
    folder, _, split = file.rpartition(":")
    if folder and Path(folder).expanduser().is_dir():
        path = Path(folder).expanduser().resolve()
        return [_Set(f"{path.name}_{split}", path.parent.name, file, places)]
    sets: dict[tuple[Path, str], _Set] = {}
    for place, source in places:
        within = source[0].resolve().parent
        name = without_number(source[0]) or within.name
        sets.setdefault((within, name), _Set(name, within.name, file, [])).places.append((place, source))
    return list(sets.values())


def numbered(row: PromptRow, group_id: int) -> Prompt:
    """The row as the prompt of that number."""
    return Prompt(row.text, group_id, row.meta, row.negative, row.messages, row.place, row.images, row.teacher)


def refuse_images(rows: Iterable[PromptRow | Prompt], reader: str) -> None:
    """Raise DataError for a row with images; `reader` says, as the end of the message, who reads none."""
    for row in rows:
        if row.images:
            raise DataError(f"{row.place} has images, and {reader}")


def question(prompt: Prompt) -> Prompt:
    """The prompt of a chat without the answer that it may end with."""
    messages = prompt.messages or []
    answered = messages and messages[-1]["role"] == "assistant"
    return replace(prompt, messages=messages[:-1]) if answered else prompt


def answer_of(value: Any, name: str, where: str) -> str | None:
    """A response: a text, or a chat of one message of the assistant, as TRL has it; None where there is none."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    messages = _messages(value, name, where, answered=True) if value else []
    if messages is None or [message["role"] for message in messages] != ["assistant"] or "content" not in messages[0]:
        raise DataError(f"{where}: {name} is a chat of {len(value)} messages; expected one of the assistant, or a text")
    return str(messages[0]["content"])


def _row(
    columns: dict[str, Any], where: str, prompt: str, about_image: bool, quoted: bool, answered: bool
) -> PromptRow:
    if prompt not in columns:
        raise DataError(f"{where}: no {prompt!r}; it has {', '.join(columns) or 'no keys'}")
    images = columns.get("images")
    shows = isinstance(images, tuple)  # the file has a column of images, of which this row may have none
    pictures: tuple[Picture, ...] = images if isinstance(images, tuple) else ()
    text = _text(columns[prompt], prompt, where, shows)
    negative = columns.get("negative_prompt")
    if negative is not None:
        negative = _text(negative, "negative_prompt", where)
    if about_image:
        text = _PLACEHOLDER.sub("", text)
        negative = None if negative is None else _PLACEHOLDER.sub("", negative)
    if not text.strip() and not pictures:
        raise DataError(f"{where}: the prompt is empty")
    meta = {name: value for name, value in columns.items() if name not in (prompt, "negative_prompt", "ground_truth")}
    truth = _ground_truth(columns, text, quoted)
    if truth is not None:
        meta["ground_truth"] = truth
    if quoted:
        return PromptRow(text, negative, meta, place=where)
    if "tools" in meta:
        meta["tools"] = _tools(meta["tools"])
    _check_marks(columns, prompt, where, shows)
    if not shows:
        return PromptRow(text, negative, meta, _messages(columns[prompt], prompt, where, answered), where)
    given = columns[prompt]
    chat = _messages(given, prompt, where, answered, shows) or [{"role": "user", "content": _parts(given)}]
    _place_images(chat, len(pictures), f"{where}: {prompt}")
    return PromptRow(text, negative, meta, chat if isinstance(given, list) or pictures else None, where, pictures)


def _check_marks(columns: dict[str, Any], prompt: str, where: str, shows: bool) -> None:
    """Raise DataError for marks of images or videos that would be read as text in a row with a column of them."""
    content = str(columns[prompt])
    marks = ((MARK, COLUMNS, f"none of them is {FORMS}"), (_VIDEO, _VIDEOS, "videos are not read"))
    for mark, names, reason in marks:
        name = next((name for name in names if columns.get(name)), None)
        if name is not None and mark in content and not (shows and mark == MARK):
            raise DataError(f"{where}: {prompt} has {mark}, and the row a column {name!r}; {reason}")


def _place_images(chat: list[dict[str, Any]], images: int, where: str) -> None:
    """Check that a chat whose contents are parts has a place for each of its images, and make the contents without
    images texts. Where it has no place at all, the images come first.
    """
    users = [message for message in chat if message["role"] == "user"]
    every = [part for message in chat for part in message.get("content", []) if part["type"] == "image"]
    if users and not every:
        every = [{"type": "image"}] * images
        users[0]["content"] = [*every, *users[0]["content"]]
    if len(every) != images:
        raise DataError(
            f"{where} has places for {len(every)} images ({MARK}, or parts {{type: image}}), and the row has {images}"
        )
    for message in chat:
        parts = message.get("content", [])
        if all(part["type"] == "text" for part in parts) and "content" in message:
            message["content"] = "".join(part["text"] for part in parts)


def _parts(text: str) -> list[dict[str, str]]:
    """A text in which images have marks, as parts of a message."""
    parts: list[dict[str, str]] = []
    for i, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _messages(value: Any, name: str, where: str, answered: bool, shows: bool = False) -> list[dict[str, Any]] | None:
    """A chat's messages with texts as contents, and what else they have (`tool_calls`); None for a plain text. Contents
    that may show images are lists of parts instead.
    """
    if not isinstance(value, list):
        return None
    messages = []
    for given in value:
        message = _without_nulls(given)
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], name, where, shows)
        calls = isinstance(message, dict) and "content" not in message and "tool_calls" in message
        keys = ("role",) if calls else ("role", "content")
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in keys):
            raise DataError(f"{where}: {name} holds a message that is not {{role, content}}, both texts")
        if shows and "content" in message:
            message["content"] = _parts(message["content"])
        messages.append(message)
    if messages[-1]["role"] == "assistant" and not answered:
        raise DataError(f"{where}: {name} ends in an answer of the assistant; expected a message that it is to answer")
    return messages


def _joined(parts: list[Any], name: str, where: str, shows: bool) -> str:
    """The text of a message in parts, {type: text, text} each, or those of images, which become marks."""
    texts = []
    for part in parts:
        if shows and _without_nulls(part) == {"type": "image"}:
            texts.append(MARK)
            continue
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: {name} holds a part of a message that is not {{type: text, text}}")
        texts.append(part["text"])
    return "".join(texts)


def _without_nulls(value: Any) -> Any:
    """A value without keys that are null: files with columns have those of all rows in each."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return value


def _tools(value: Any) -> Any:
    """Tools for the chat template, a list of JSON schemas, or the JSON text of one or of each; any other value as it
    is.
    """
    value = _parsed(value, list)
    if isinstance(value, list):
        value = [_parsed(item, dict) for item in value]
    return _without_nulls(value)


def _parsed(value: Any, kind: type) -> Any:
    """The value of a JSON text of that kind; any other value as it is."""
    try:
        parsed = parse_json(value) if isinstance(value, str) else None
    except ValueError:
        return value
    return parsed if isinstance(parsed, kind) else value


def share_of_rank(prompts: Sequence[Prompt], rank: int, ranks: int) -> list[Prompt]:
    """The prompts that a rank samples, equally many on all ranks: the last one fills up the end, where its samples are
    to be dropped.
    """
    share = -(-len(prompts) // ranks)
    return [prompts[min(rank * share + j, len(prompts) - 1)] for j in range(share)]


def _ground_truth(columns: dict[str, Any], text: str, quoted: bool) -> Any:
    """The ground truth of a row or of its prompt, None if neither has one."""
    if columns.get("ground_truth") is not None:
        return columns["ground_truth"]
    model = columns.get("reward_model")
    if isinstance(model, dict) and model.get("ground_truth") is not None:
        return model["ground_truth"]
    if not quoted:
        return columns.get("answer")
    span = _QUOTED.search(text)
    return span.group(1) if span else None


def _text(value: Any, name: str, where: str, shows: bool = False) -> str:
    """A text, or the content of a chat's last user message; without marks of images where it shows some."""
    if isinstance(value, list):
        messages = [m for m in value if isinstance(m, dict) and m.get("role") == "user"]
        if not messages:
            raise DataError(f"{where}: {name} is a list without a user message; expected text or [{{role, content}}]")
        value = messages[-1].get("content")
        if isinstance(value, list):
            value = _joined(value, name, where, shows)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is of type {kind_of(value)}; expected text, or a chat of texts")
    if len(value) > LONGEST:
        raise DataError(f"{where}: {name} has {len(value)} characters; expected at most {LONGEST}")
    return value.replace(MARK, "") if shows else value
