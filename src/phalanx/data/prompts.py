"""Prompts: reading them from files."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.config.files import kind, parse_json, read_bytes
from phalanx.config.messages import cut, reason
from phalanx.media.pictures import Picture
from phalanx.types import Prompt

FORMATS = "a .txt, .jsonl, .csv or .parquet file, or the folder of a Hugging Face dataset (folder:split for one split)"
LONGEST = 100_000  # characters of a prompt: far beyond any encoder, and a tokenizer is not at it for minutes
_Located = tuple[str, dict[str, Any]]  # a row's place, for messages, and its columns
_KINDS = {
    bool: "boolean",
    int: "number",
    float: "number",
    dict: "object",
    list: "list",
    str: "text",
    type(None): "null",
}
_QUOTED = re.compile(r'["“”„‟«]([^"“”„‟«»]+)["“”‟»]')


@dataclass(frozen=True)
class PromptRow:
    """A row of a data file; `meta` holds what a reward may need, `messages` a language model's whole chat."""

    text: str
    negative: str | None
    meta: dict[str, Any]
    messages: list[dict[str, str]] | None = None
    place: str = ""  # its key, file and line or row, for messages


class DataError(ValueError):
    """A data file that cannot be used; the message is one line, with the file and line or row."""


def load_prompts(
    files: list[str],
    key: str,
    images: Sequence[str] = (),
    prompt: str = "prompt",
    *,
    quoted: bool = True,
    answered: bool = False,
) -> list[PromptRow]:
    """All rows of all files, in order; `key` is the config key that lists them, for messages.

    `images` are columns that every row must have, as Pictures in `meta`: they are read when needed. `prompt` is the
    column of the prompts, in formats that have columns.

    - `.txt`: one prompt per line; blank lines are skipped.
    - `.jsonl`: one object per line, with `prompt` (text, or a chat) and optionally `negative_prompt`.
    - `.csv`: the same as columns, which the first line names; an empty cell is no value.
    - `.parquet` and Hugging Face datasets: the same as columns; VeRL-Omni's files need no changes.

    Of a chat (a list of `{role, content}`) the last user message is the prompt. All other columns go into `meta`;
    `meta["ground_truth"]` is, in this order, the column `ground_truth`, `reward_model.ground_truth`, with `quoted` the
    first span of the prompt in double quotes (straight or typographic), otherwise the column `answer`, or absent.
    Without `quoted`, for language models, a chat is kept whole; it may end with the assistant's answer if `answered`.

    Raises DataError for a file or row that cannot be used. Lines are counted from 1, rows from 0.
    """
    if not files:
        raise DataError(f"{key} is empty; give a list of files, each {FORMATS}")
    rows: list[PromptRow] = []
    for file in files:
        path, split = _locate(file, key)
        read = _read(path, split, f"{key}: {file}", images, prompt)
        column = "prompt" if path.suffix == ".txt" else prompt
        before = len(rows)
        for where, columns in read:
            rows.append(_row(columns, where, column, quoted, answered))
        if len(rows) == before:
            raise DataError(f"{key}: {file} has no prompts")
    return rows


def validation_sets(
    files: list[str],
    limit: int | None = None,
    images: Sequence[str] = (),
    prompt: str = "prompt",
    *,
    quoted: bool = True,
    answered: bool = False,
) -> dict[str, list[Prompt]]:
    """The rows of each file of `data.val_files`, at most `limit`, by the file's name without ending.

    A split of a dataset folder is named `folder_split`. `group_id` is the row's number. For the others see
    `load_prompts`.
    """
    key = "data.val_files"
    sets: dict[str, list[Prompt]] = {}
    origin: dict[str, str] = {}
    for file in files:
        path, split = _locate(file, key)
        name = path.stem if path.is_file() else path.resolve().name
        if split is not None:
            name += f"_{split}"
        if name in sets:
            raise DataError(
                f"{key}: {origin[name]} and {file} would both be the validation set {name!r}; rename one of them"
            )
        origin[name] = file
        rows = load_prompts([file], key, images, prompt, quoted=quoted, answered=answered)[:limit]
        sets[name] = [numbered(row, i) for i, row in enumerate(rows)]
    return sets


def numbered(row: PromptRow, group_id: int) -> Prompt:
    """The row as the prompt of that number."""
    return Prompt(row.text, group_id, row.meta, row.negative, row.messages, row.place)


def _locate(file: str, key: str) -> tuple[Path, str | None]:
    """The path, and the split of `folder:split`."""
    path = Path(file)
    try:
        if kind(path) is not None:
            return path.expanduser(), None
        folder, _, split = file.rpartition(":")
        if folder and kind(Path(folder)) == "folder":
            return Path(folder).expanduser(), split
    except OSError as error:
        raise DataError(f"{key}: {cut(file)} cannot be read: {error.strerror}") from None
    path = path.expanduser()
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, 1)
    hint = f"did you mean {path.parent / near[0]}?" if near else f"expected {FORMATS}"
    raise DataError(f"{key}: {file} does not exist; {hint}")


def _read(path: Path, split: str | None, place: str, images: Sequence[str], prompt: str) -> Iterator[_Located]:
    """The rows of a file, of which messages say that it is at `place`."""
    if path.is_dir():
        return _dataset_rows(path, split, place, images, prompt)
    if path.suffix == ".txt":
        if images:
            raise DataError(f"{place} is plain text; images ({', '.join(images)}) come in the other formats")
        return ((where, {"prompt": line}) for where, line in _lines(path, place))
    if path.suffix == ".jsonl":
        return _json_rows(path, place, images)
    if path.suffix == ".csv":
        return _csv_rows(path, place, images, prompt)
    if path.suffix == ".parquet":
        return _parquet_rows(path, place, images, prompt)
    ending = f"ends in {path.suffix}" if path.suffix else "has no ending"
    raise DataError(f"{place} {ending}; expected {FORMATS}")


def _lines(path: Path, place: str) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each with its place."""
    try:
        content = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{place} cannot be read: {error.strerror}") from None
    # not str.splitlines: only newlines end a line, and other separators may be part of a prompt
    for number, raw in enumerate(content.split(b"\n"), 1):
        where = f"{place}:{number}"
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            byte = f"byte 0x{raw[error.start]:02x}"
            raise DataError(f"{where}: not UTF-8 ({byte}); save the file as UTF-8") from None
        if line:
            yield where, line


def json_objects(path: Path, place: str) -> Iterator[_Located]:
    """The objects of a file of JSON lines, each with its place; raises DataError for a line that holds none."""
    expected = 'expected one object per line, {"prompt": "..."}'
    for where, line in _lines(path, place):
        try:
            value = parse_json(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); {expected}") from None
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error}); {expected}") from None
        if not isinstance(value, dict):
            raise DataError(f"{where}: JSON of type {_kind(value)}; {expected}")
        yield where, value


def _json_rows(path: Path, place: str, images: Sequence[str]) -> Iterator[_Located]:
    for where, value in json_objects(path, place):
        for name in images:
            if name not in value:
                raise DataError(f"{where}: no {name!r}; it has {', '.join(value) or 'no keys'}")
            value[name] = Picture(partial(_given, value[name]), path.parent, f"{where}: {name}")
        yield where, value


def _csv_rows(path: Path, place: str, images: Sequence[str], prompt: str) -> Iterator[_Located]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(reader.fieldnames or [], place, (prompt, *images))
            for row in reader:
                where = f"{place}:{reader.line_num}"
                if None in row:
                    raise DataError(f"{where}: more cells than the header has columns; expected quotes around commas")
                value: dict[str, Any] = {name: cell or None for name, cell in row.items()}
                value[prompt] = row[prompt] or ""
                for name in images:
                    value[name] = Picture(partial(_given, value[name]), path.parent, f"{where}: {name}")
                yield where, value
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{place}:{reader.reader.line_num}: not CSV ({error})") from None


def _given(value: Any) -> Any:
    return value


def _parquet_rows(path: Path, place: str, images: Sequence[str], prompt: str) -> Iterator[_Located]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(path)
        _check_columns(source.schema_arrow.names, place, (prompt, *images))
        rows = _mapped(path) if images else source.read().to_pylist()
    # UnicodeDecodeError, a ValueError, comes from a text column
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{place} is not a Parquet file: {first}") from error
    return _with_pictures(rows, path.parent, place, images) if images else _numbered(rows, place)


def _mapped(path: Path) -> Any:
    """A Parquet file as a dataset that stays on disk.

    `datasets` keeps a copy in its cache, from which it can read a single row.
    """
    import datasets

    datasets.disable_progress_bars()  # every rank would draw its own
    return datasets.Dataset.from_parquet(str(path))


def _numbered(rows: Iterable[dict[str, Any]], place: str) -> Iterator[_Located]:
    return ((f"{place}, row {number}", row) for number, row in enumerate(rows))


def _with_pictures(dataset: Any, folder: Path, place: str, images: Sequence[str]) -> Iterator[_Located]:
    """The rows of a dataset on disk, with Pictures in place of images."""
    from datasets import Image

    columns = {name: dataset.select_columns([name]) for name in images}
    for name, column in columns.items():
        if isinstance(column.features[name], Image):
            columns[name] = column.cast_column(name, Image(decode=False))

    def cell(name: str, number: int) -> Any:
        return columns[name][number][name]

    for number, (where, texts) in enumerate(_numbered(dataset.remove_columns(list(images)), place)):
        pictures = {name: Picture(partial(cell, name, number), folder, f"{where}: {name}") for name in images}
        yield where, {**texts, **pictures}


def _dataset_rows(path: Path, split: str | None, place: str, images: Sequence[str], prompt: str) -> Iterator[_Located]:
    from datasets import DatasetDict

    dataset = load_dataset(
        path, place, f"{place} is a folder, but not a dataset written by save_to_disk; expected {FORMATS}"
    )
    if isinstance(dataset, DatasetDict):
        splits = list(dataset)
        if split is None and len(splits) > 1:
            raise DataError(f"{place} has the splits {', '.join(splits)}; name one, e.g. {path}:{splits[0]}")
        if split is not None and split not in splits:
            raise DataError(f"{place}: there is no split {split!r}; it has {', '.join(splits)}")
        dataset = dataset[split if split is not None else splits[0]]
    elif split is not None:
        raise DataError(f"{place}: the dataset has no splits; expected {path}")
    _check_columns(dataset.column_names, place, (prompt, *images))
    return _with_pictures(dataset, path, place, images) if images else _numbered(dataset, place)


def load_dataset(path: Path, place: str, absent: str) -> Any:
    """A Hugging Face dataset folder. Raises DataError: `absent` where it is none, and for a damaged one."""
    from datasets import load_from_disk

    try:
        return load_from_disk(str(path))
    except FileNotFoundError:
        raise DataError(absent) from None
    except Exception as error:  # its JSON files are foreign, and `datasets` stumbles over them in whatever way
        raise DataError(f"{place}: the dataset is damaged: {reason(error)}") from error


def _check_columns(columns: Sequence[str], place: str, wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in columns:
            raise DataError(f"{place} has no column {name!r}; it has {', '.join(columns) or 'none'}")


def _row(columns: dict[str, Any], where: str, prompt: str, quoted: bool, answered: bool) -> PromptRow:
    if prompt not in columns:
        raise DataError(f"{where}: no {prompt!r}; it has {', '.join(columns) or 'no keys'}")
    text = _text(columns[prompt], prompt, where)
    if not text.strip():
        raise DataError(f"{where}: the prompt is empty")
    negative = columns.get("negative_prompt")
    if negative is not None:
        negative = _text(negative, "negative_prompt", where)
    meta = {name: value for name, value in columns.items() if name not in (prompt, "negative_prompt", "ground_truth")}
    truth = _ground_truth(columns, text, quoted)
    if truth is not None:
        meta["ground_truth"] = truth
    messages = None if quoted else _messages(columns[prompt], prompt, where, answered)
    return PromptRow(text, negative, meta, messages, where)


def _messages(value: Any, name: str, where: str, answered: bool) -> list[dict[str, str]] | None:
    """A chat's messages, None for a plain text."""
    if not isinstance(value, list):
        return None
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}: {name} holds a message that is not {{role, content}}, both texts")
    if value[-1]["role"] == "assistant" and not answered:
        raise DataError(f"{where}: {name} ends in an answer of the assistant; expected a message that it is to answer")
    return [{"role": message["role"], "content": message["content"]} for message in value]


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


def _text(value: Any, name: str, where: str) -> str:
    """A text, or the content of a chat's last user message."""
    if isinstance(value, list):
        messages = [m for m in value if isinstance(m, dict) and m.get("role") == "user"]
        if not messages:
            raise DataError(f"{where}: {name} is a list without a user message; expected text or [{{role, content}}]")
        value = messages[-1].get("content")  # a message with parts has a list there: reported below
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is of type {_kind(value)}; expected text, or a chat of texts")
    if len(value) > LONGEST:
        raise DataError(f"{where}: {name} has {len(value)} characters; expected at most {LONGEST}")
    return value


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    return _KINDS.get(type(value), type(value).__name__)
