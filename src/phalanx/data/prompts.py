"""Prompts: reading them from files."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.config.files import parse_json
from phalanx.data.data_files import CONVERSATIONS, FORMATS, LONGEST, DataError, kind_of, locate, read, without_number
from phalanx.data.hub import SCHEME, set_name
from phalanx.data.shown import COLUMNS, IMAGE_PARTS, take_held, without_nulls
from phalanx.data.unusable import UnusableRows
from phalanx.media.pictures import FORMS, Picture
from phalanx.types import Prompt

_QUOTED = re.compile(r'["“”„‟«]([^"“”„‟«»]+)["“”‟»]')
_PLACEHOLDER = re.compile(r"(Picture \d+: ?)?<image>")  # VeRL-Omni's mark of an image, which the model places itself
MARK = "<image>"  # verl's mark of an image in a text
_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}  # of ShareGPT
_CHATS = ("prompt", "completion", "chosen", "rejected")
_VIDEO, _VIDEOS = "<video>", ("videos", "video")  # verl's mark of a video, and its columns of videos


def load_prompts(
    files: list[str],
    key: str,
    images: Sequence[str] = (),
    prompt: str = "prompt",
    *,
    quoted: bool = True,
    answered: bool = False,
    image_key: str | None = None,
    unusable: str = "error",
) -> list[Prompt]:
    """Read all rows of all files, in order, as prompts with the `group_id` 0.

    files: paths of files, of folders or patterns of such files, or of Hugging Face dataset folders, or data sets of the
        hub.
    key: the config key of `files`, for messages.
    images: columns that every row must have. They become Pictures in `meta`, which are read when needed.
    prompt: column of the prompts, in formats with columns.
    quoted: for flow models: the ground truth may be quoted in the prompt. False for language models.
    answered: for language models: a chat may end with the assistant's answer.
    image_key: for language models: column of the prompts' images; None: `images`, or else `image`.
    unusable: data.unusable_rows; `filter` leaves out lines and rows that cannot be used, with a warning.

    - `.txt`: one prompt per line; blank lines are skipped.
    - `.jsonl`: one object per line, with `prompt` (a text or a chat) and optionally `negative_prompt`.
    - `.csv`: the same as columns, named in the first line; an empty cell means no value.
    - `.parquet` and Hugging Face datasets: the same as columns; VeRL-Omni's files work unchanged.
    - `file.py:function`: the same as dicts that the function returns or yields.

    The prompt of a chat (a list of `{role, content}`, where a content is a text or parts `{type: text, text}`, or the
    JSON text of such a list, as in .csv files) is its last user message; language models also keep the whole chat, with
    its tool calls, and read ShareGPT's messages {from, value}. All other columns go into `meta`.
    `meta["ground_truth"]` is the first available of: the column
    `ground_truth`; `reward_model.ground_truth`; and if `quoted`, the first span of the prompt in double quotes
    (straight or typographic), otherwise the column `answer`.
    The images of a language model's prompts, one or a list per row, or none, are `images` (see Prompt) and
    `meta["images"]`, a tuple of Pictures. Their places are `<image>` in texts or parts `{type: image}`; without either,
    they precede the first user's text. Parts may also hold their images, see phalanx.data.shown.take_held. Other
    columns of images are left out.

    Raises DataError for a file or row that cannot be used. Lines are counted from 1, rows from 0.
    """
    if not files:
        raise DataError(f"{key} is empty; give a list of files, each {FORMATS}")
    rows: list[Prompt] = []
    drop = UnusableRows(key, unusable)
    for file in files:
        for name, (path, split) in locate(file, key):
            place, before = f"{key}: {name}", len(rows) + len(drop.reasons)
            column = "prompt" if path.suffix == ".txt" else prompt
            located = read(path, split, place, images, prompt, drop, texts=not quoted, image_key=image_key)
            folder = path if path.is_dir() else path.parent
            for where, columns in located:
                if not quoted:
                    columns = _with_roles(columns, column)
                try:
                    if column in columns:
                        columns[column] = _decode_chat(columns[column])
                    if not quoted:
                        take_held(columns, column, folder, where)
                    row = _parse_row(columns, where, column, bool(images), quoted, answered)
                    if not quoted:
                        _check_marks(columns, column, where, COLUMNS if image_key is None else (image_key,))
                    rows.append(row)
                except DataError as error:
                    drop(error)
            if len(rows) + len(drop.reasons) == before:
                raise DataError(f"{place} has no prompts")
    drop.report(len(rows))
    return rows


def validation_sets(files: list[str], limit: int | None = None, **form: Any) -> dict[str, list[Prompt]]:
    """Read the validation sets in `data.val_files`, each with at most `limit` rows, by name. form: see `load_prompts`.

    A set has the name of its file without suffix; a split of a folder or of a data set of the hub is named
    `folder_split`, the rows of a function `file_function`. Each file of a pattern is a set, except that the parts of a
    file make one set. Sets that would have the same name are prefixed with that of their folder. A prompt's `group_id`
    is its row number.
    """
    key = "data.val_files"
    entries: list[_Set] = []
    for file in files:
        entries += _validation_sets(file, key)
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
        rows = load_prompts(entry.places, key, **form)
        sets[name] = [replace(row, group_id=i) for i, row in enumerate(rows[:limit])]
    return sets


@dataclass
class _Set:
    """A validation set: its name, the name of its folder, the entry that lists it, and the entries of its files."""

    name: str
    parent: str
    file: str
    places: list[str]


def _validation_sets(file: str, key: str) -> list[_Set]:
    """The validation sets of an entry."""
    places = locate(file, key)
    if file.startswith(SCHEME):
        return [_Set(*set_name(file, f"{key}: {file}"), file, [file])]
    path = Path(file).expanduser()
    if path.exists():
        name = path.stem if path.is_file() else path.resolve().name
        return [_Set(name, path.resolve().parent.name, file, [file])]
    folder, _, split = file.rpartition(":")
    if folder and Path(folder).expanduser().exists():
        path = Path(folder).expanduser().resolve()
        return [_Set(f"{path.name.removesuffix('.py')}_{split}", path.parent.name, file, [file])]
    sets: dict[tuple[Path, str], _Set] = {}
    for place, (path, _) in places:
        within = path.resolve().parent
        name = without_number(path) or within.name
        sets.setdefault((within, name), _Set(name, within.name, file, [])).places.append(place)
    return list(sets.values())


def refuse_images(rows: Iterable[Prompt], reader: str) -> None:
    """Raise DataError for a row with images. reader: end of the message that says which model cannot read them."""
    for row in rows:
        if row.images:
            raise DataError(f"{row.place} has images, and {reader}")


def question(prompt: Prompt) -> Prompt:
    """The prompt without the assistant's answer with which its chat may end."""
    messages = prompt.messages or []
    answered = messages and messages[-1]["role"] == "assistant"
    return replace(prompt, messages=messages[:-1]) if answered else prompt


def answer_of(value: Any, name: str, where: str) -> str | None:
    """A response given as text or, as in TRL, as a chat of one assistant message; None if there is none."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else None
    messages = _parse_messages(value, name, where, answered=True) if value else []
    if messages is None or [message["role"] for message in messages] != ["assistant"] or "content" not in messages[0]:
        raise DataError(f"{where}: {name} is a chat of {len(value)} messages; expected one of the assistant, or a text")
    return str(messages[0]["content"])


def chat_of(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """A chat in the column `name`, which may end with the assistant."""
    return (_parse_messages(value, name, where, answered=True) if value else None) or []


def _parse_row(
    columns: dict[str, Any], where: str, prompt: str, about_image: bool, quoted: bool, answered: bool
) -> Prompt:
    if prompt not in columns:
        raise DataError(f"{where}: no {prompt!r}; it has {', '.join(columns) or 'no keys'}")
    images = columns.get("images")
    shows = isinstance(images, tuple)  # the file has a column of images, which may be empty in this row
    pictures: tuple[Picture, ...] = images if isinstance(images, tuple) else ()
    text = _prompt_text(columns[prompt], prompt, where, shows)
    negative = columns.get("negative_prompt")
    if negative is not None:
        negative = _prompt_text(negative, "negative_prompt", where)
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
        return Prompt(text, 0, meta, negative, place=where)
    if "tools" in meta:
        meta["tools"] = _parse_tools(meta["tools"])
    if not shows:
        return Prompt(text, 0, meta, negative, _parse_messages(columns[prompt], prompt, where, answered), where)
    given = columns[prompt]
    chat = _parse_messages(given, prompt, where, answered, shows) or [{"role": "user", "content": message_parts(given)}]
    _place_images(chat, len(pictures), f"{where}: {prompt}")
    return Prompt(text, 0, meta, negative, chat if isinstance(given, list) or pictures else None, where, pictures)


def _check_marks(columns: dict[str, Any], prompt: str, where: str, shown: Sequence[str]) -> None:
    """Raise DataError if the prompt of a row with a column of images or videos has marks of them that would be read as
    text; `shown`: names of the columns of images.
    """
    content, shows = str(columns[prompt]), isinstance(columns.get("images"), tuple)
    marks = ((MARK, shown, f"none of them is {FORMS}"), (_VIDEO, _VIDEOS, "videos are not read"))
    for mark, names, reason in marks:
        name = next((name for name in names if columns.get(name)), None)
        if name is not None and mark in content and not (shows and mark == MARK):
            raise DataError(f"{where}: {prompt} has {mark}, and the row a column {name!r}; {reason}")
    if MARK in content and not shows and not columns.keys().isdisjoint(shown):
        raise DataError(_count_mismatch(content.count(MARK), 0, f"{where}: {prompt}"))


def _place_images(chat: list[dict[str, Any]], images: int, where: str) -> None:
    """Check that a chat whose contents are lists of parts has a place for each of its images, and convert contents
    without images to texts. If the chat has no places at all, the images come first.
    """
    users = [message for message in chat if message["role"] == "user"]
    places = [part for message in chat for part in message.get("content", []) if part["type"] == "image"]
    if users and not places:
        places = [{"type": "image"}] * images
        users[0]["content"] = [*places, *users[0]["content"]]
    if len(places) != images:
        raise DataError(_count_mismatch(len(places), images, where))
    for message in chat:
        parts = message.get("content", [])
        if all(part["type"] == "text" for part in parts) and "content" in message:
            message["content"] = "".join(part["text"] for part in parts)


def _count_mismatch(places: int, images: int, where: str) -> str:
    return f"{where} has places for {places} images ({MARK}, or parts {{type: image}}), but the row has {images}"


def message_parts(text: str) -> list[dict[str, str]]:
    """Split a text with marks of images into the parts of a message."""
    parts: list[dict[str, str]] = []
    for i, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _parse_messages(
    value: Any, name: str, where: str, answered: bool, shows: bool = False
) -> list[dict[str, Any]] | None:
    """A chat's messages with contents as texts, and their further keys such as `tool_calls`; None for a plain text.

    shows: contents may show images and become lists of parts instead.
    """
    if not isinstance(value, list):
        return None
    messages = []
    for given in value:
        message = without_nulls(given)
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message["content"] = _join_parts(message["content"], name, where, shows)
        calls = isinstance(message, dict) and "content" not in message and "tool_calls" in message
        keys = ("role",) if calls else ("role", "content")
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in keys):
            raise DataError(f"{where}: {name} contains a message that is not {{role, content}}, both texts")
        if shows and "content" in message:
            message["content"] = message_parts(message["content"])
        messages.append(message)
    if messages[-1]["role"] == "assistant" and not answered:
        raise DataError(f"{where}: {name} ends with an answer of the assistant; expected a message to be answered")
    return messages


def _join_parts(parts: list[Any], name: str, where: str, shows: bool) -> str:
    """Join the parts of a message, {type: text, text} each, to a text. Parts {type: image} become marks."""
    texts = []
    for part in parts:
        if shows and without_nulls(part) == {"type": "image"}:
            texts.append(MARK)
            continue
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            keys = ", ".join([f"type: {part['type']}", *(str(key) for key in without_nulls(part) if key != "type")])
            raise DataError(
                f"{where}: {name} has a part {{{keys}}} of a message; expected the row's images in a column "
                f"`images`, and parts {{type: image}} in their places, or {{type: image, image}} with {FORMS}"
            )
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: {name} contains a part of a message that is not {{type: text, text}}")
        texts.append(part["text"])
    return "".join(texts)


def _parse_tools(value: Any) -> Any:
    """Tools for the chat template as a list of JSON schemas. Parses JSON text of the list or of its elements; any other
    value is unchanged.
    """
    value = _decode_json(value, list)
    if isinstance(value, list):
        value = [_decode_json(item, dict) for item in value]
    return without_nulls(value)


def _decode_json(value: Any, kind: type) -> Any:
    """The value of a JSON text if it is of this kind; any other value unchanged."""
    try:
        parsed = parse_json(value) if isinstance(value, str) else None
    except ValueError:
        return value
    return parsed if isinstance(parsed, kind) else value


def _decode_chat(value: Any) -> Any:
    """The list of a chat that is given as JSON text; any other value unchanged."""
    chat = _decode_json(value, list) if isinstance(value, str) and value.lstrip().startswith("[") else None
    shown = chat and isinstance(chat, list) and all(isinstance(each, dict) and "role" in each for each in chat)
    return chat if shown else value


def _with_roles(columns: dict[str, Any], prompt: str) -> dict[str, Any]:
    """The columns of a row whose chats may have ShareGPT's messages, or the column `conversations` for `messages`."""
    columns = dict(columns)
    if prompt == "messages" and prompt not in columns and CONVERSATIONS in columns:
        columns[prompt] = columns.pop(CONVERSATIONS)
    for name in {prompt, *_CHATS} & columns.keys():
        if isinstance(columns[name], list):
            columns[name] = list(map(_with_role, columns[name]))
    return columns


def _with_role(given: Any) -> Any:
    """ShareGPT's message {from, value} as {role, content} or {role, tool_calls}; any other value unchanged."""
    if not isinstance(given, dict) or not {"from", "value"} <= given.keys() or given.get("role") is not None:
        return given
    role, value = given["from"], given["value"]
    message = {"role": _ROLES.get(str(role), role), "content": value}
    calls = _decode_json(value, list)
    calls = calls if isinstance(calls, list) else [_decode_json(value, dict)]
    if role == "function_call" and all(isinstance(call, dict) for call in calls):
        del message["content"]
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return message


def share_of_rank(prompts: Sequence[Prompt], rank: int, ranks: int) -> list[Prompt]:
    """The prompts that a rank samples, the same number on all ranks. The last prompt is repeated at the end, where the
    caller drops its samples.
    """
    share = -(-len(prompts) // ranks)
    return [prompts[min(rank * share + j, len(prompts) - 1)] for j in range(share)]


def _ground_truth(columns: dict[str, Any], text: str, quoted: bool) -> Any:
    """The ground truth of a row; None if it has none, or NaN as of pandas. See `load_prompts`."""
    model = _decode_json(columns.get("reward_model"), dict)
    places = [columns, model if isinstance(model, dict) else {}]
    given = [place.get("ground_truth") for place in places] + ([] if quoted else [columns.get("answer")])
    for truth in given:
        if truth is not None and not (isinstance(truth, float) and math.isnan(truth)):
            return truth
    if not quoted:
        return None
    span = _QUOTED.search(text)
    return span.group(1) if span else None


def _prompt_text(value: Any, name: str, where: str, shows: bool = False) -> str:
    """A text, or the content of a chat's last user message. shows: remove the marks of images."""
    if isinstance(value, list):
        messages = [m for m in value if isinstance(m, dict) and m.get("role") == "user"]
        if not messages:
            raise DataError(f"{where}: {name} is a list without a user message; expected text or [{{role, content}}]")
        value = messages[-1].get("content")
        if isinstance(value, list):
            value = _join_parts(value, name, where, shows)
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is of type {kind_of(value)}; expected text, or a chat of texts")
    if len(value) > LONGEST:
        raise DataError(f"{where}: {name} has {len(value)} characters; expected at most {LONGEST}")
    return value.replace(MARK, "") if shows else value
