"""Prompts: reading them from files, and the order in which training and validation see them."""

import functools
import json
import logging
import math
import random
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.pictures import Picture
from phalanx.types import Prompt

logger = logging.getLogger(__name__)

FORMATS = "a .txt, .jsonl or .parquet file, or the folder of a Hugging Face dataset (folder:split for one split)"
_QUOTED = re.compile(r'["“”„‟«]([^"“”„‟«»]+)["“”‟»]')


@dataclass(frozen=True)
class PromptRow:
    """A row of a data file; `negative` is None where the file says nothing, `meta` holds what the reward may need."""

    text: str
    negative: str | None
    meta: dict[str, Any]


class DataError(ValueError):
    """A data file that cannot be used; the message is one line with the file and the line or row."""


def load_prompts(files: list[str], key: str, images: Sequence[str] = ()) -> list[PromptRow]:
    """All rows of all files, in order; `key` is the config key that lists them, for messages.

    `images` are columns that every row must have, as Pictures in `meta`: they are read when they are wanted.

    - `.txt`: a prompt a line; blank lines are skipped.
    - `.jsonl`: an object a line with `prompt` (text, or a chat) and optionally `negative_prompt`.
    - `.parquet` and Hugging Face datasets: the same as columns; VeRL-Omni's files are read as they are.

    Of a chat (a list of `{role, content}`) the last user message is the prompt. All other columns go into `meta`;
    `meta["ground_truth"]` is, in this order, the column `ground_truth`, `reward_model.ground_truth`, the first span of
    the prompt in double quotes (straight or typographic), or absent.

    Raises DataError for a file or row that cannot be used. Lines are counted from 1, rows from 0.
    """
    if not files:
        raise DataError(f"{key} is empty; give a list of files, each {FORMATS}")
    rows: list[PromptRow] = []
    for file in files:
        path, split = _locate(file, key)
        found = list(_read(path, split, file, key, images))
        if not found:
            raise DataError(f"{key}: {file} has no prompts")
        rows += found
    return rows


class Shuffled:
    """An endless sequence of the numbers 0 .. size-1: epoch after epoch, each in an order named by (seed, epoch)."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self._size)
        return self._order(epoch)[index]

    def _permutation(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        # A string seed is hashed with SHA-512, the same in every process; hash() would not be.
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class PromptStream:
    """Endless batches of prompts: epoch after epoch, each in an order of its own.

    A batch depends on (rows, batch_size, seed, step) alone, so every rank sees the same one, and a resumed run goes on
    as if it had not stopped. A batch may straddle two epochs; no prompt is left out.
    """

    def __init__(self, rows: list[PromptRow], batch_size: int, seed: int) -> None:
        assert rows and batch_size > 0, (len(rows), batch_size)
        self._rows = rows
        self._batch_size = batch_size
        self._order = Shuffled(len(rows), seed)
        if batch_size > len(rows):
            logger.warning(
                "data.train_batch_size=%d is more than the %d prompts of the data; a batch holds some several times",
                batch_size,
                len(rows),
            )

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of one training step over the world; `group_id` counts them from 0."""
        first = step * self._batch_size
        return [_prompt(self._rows[self._order[first + i]], i) for i in range(self._batch_size)]

    def steps(self, epochs: float) -> int:
        """Training steps that `epochs` passes over the data take, rounded up."""
        # 0.1 * 30 / 3 is a little more than 1 in floating point
        return max(1, math.ceil(epochs * len(self._rows) / self._batch_size - 1e-9))


def validation_sets(files: list[str], limit: int | None = None, images: Sequence[str] = ()) -> dict[str, list[Prompt]]:
    """The rows of each file of `data.val_files`, at most `limit`, by the file's name without its ending. `images`: see
    `load_prompts`.

    A split of a dataset folder is named `folder_split`. `group_id` is the row's number.
    """
    key = "data.val_files"
    sets: dict[str, list[Prompt]] = {}
    origin: dict[str, str] = {}
    for file in files:
        path, split = _locate(file, key)
        name = path.stem if path.is_file() else path.resolve().name
        name += f"_{split}" if split is not None else ""
        if name in sets:
            raise DataError(
                f"{key}: {origin[name]} and {file} would both be the validation set {name!r}; rename one of them"
            )
        origin[name] = file
        rows = load_prompts([file], key, images)[:limit]
        sets[name] = [_prompt(row, i) for i, row in enumerate(rows)]
    return sets


def held_out_overlap(
    train: Iterable[PromptRow | Prompt], val: Iterable[PromptRow | Prompt], image: str | None = None
) -> int:
    """How many validation prompts are training prompts as well, with the same image file in the column `image` where it
    is given; warns where there are any. Raises ValueError for an image that cannot be read.
    """
    held_out = list(val)
    seen, same = _common(list(train), held_out, lambda row: row.text.strip())
    if image is not None:  # first by the files' sizes: to read all images takes long
        seen, same = _common(seen, same, lambda row: (row.text.strip(), row.meta[image].file_size))
        seen, same = _common(seen, same, lambda row: (row.text.strip(), row.meta[image].digest))
    overlap = len(same)
    if overlap:
        logger.warning(
            "%d of %d validation prompts are training prompts as well; they do not measure generalisation",
            overlap,
            len(held_out),
        )
    return overlap


_Rows = list[PromptRow | Prompt]


def _common(some: _Rows, others: _Rows, name: Callable[[PromptRow | Prompt], Hashable]) -> tuple[_Rows, _Rows]:
    """The rows of each whose name a row of the other has as well."""
    both = {name(row) for row in some} & {name(row) for row in others}
    return [row for row in some if name(row) in both], [row for row in others if name(row) in both]


def _prompt(row: PromptRow, group_id: int) -> Prompt:
    return Prompt(text=row.text, group_id=group_id, meta=row.meta, negative=row.negative)


def _locate(file: str, key: str) -> tuple[Path, str | None]:
    """The path, and the split of `folder:split`."""
    path = Path(file).expanduser()
    if path.exists():
        return path, None
    folder, _, split = file.rpartition(":")
    if folder and Path(folder).expanduser().is_dir():
        return Path(folder).expanduser(), split
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, 1)
    hint = f"; did you mean {path.parent / near[0]}?" if near else f"; right is {FORMATS}"
    raise DataError(f"{key}: {file} does not exist{hint}")


def _read(path: Path, split: str | None, file: str, key: str, images: Sequence[str]) -> Iterator[PromptRow]:
    if path.is_dir():
        source = _dataset_rows(path, split, file, key, images)
    elif path.suffix == ".txt" and images:
        raise DataError(f"{key}: {file} is plain text; images ({', '.join(images)}) come in the other formats")
    elif path.suffix == ".txt":
        for where, line in _lines(path, file, key):
            yield _row({"prompt": line}, where)
        return
    elif path.suffix == ".jsonl":
        source = _json_rows(path, file, key, images)
    elif path.suffix == ".parquet":
        source = _parquet_rows(path, file, key, images)
    else:
        ending = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise DataError(f"{key}: {file} {ending}; right is {FORMATS}")
    for where, columns in source:
        yield _row(columns, where)


def _lines(path: Path, file: str, key: str) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each with its place. Only newlines end a line: other separators are text."""
    for number, raw in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"{key}: {file}:{number}"
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 (byte 0x{raw[error.start]:02x}); save the file as UTF-8") from None
        if line:
            yield where, line


def _json_rows(path: Path, file: str, key: str, images: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    right = 'right is an object a line, {"prompt": "..."}'
    for where, line in _lines(path, file, key):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); {right}") from None
        if not isinstance(value, dict):
            raise DataError(f"{where}: JSON of type {_kind(value)}; {right}")
        for name in images:
            if name not in value:
                raise DataError(f"{where}: no {name!r}; it has {', '.join(value) or 'no keys'}")
            value[name] = Picture(partial(_given, value[name]), path.parent, f"{where}: {name}")
        yield where, value


def _given(value: Any) -> Any:
    return value


def _parquet_rows(path: Path, file: str, key: str, images: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(path)
        _check_columns(source.schema_arrow.names, f"{key}: {file}", images)
        if images:
            yield from _with_pictures(_mapped(path), path.parent, f"{key}: {file}", images)
            return
        table = source.read()
    except pa.ArrowInvalid as error:
        raise DataError(f"{key}: {file} is no Parquet file: {str(error).splitlines()[0]}") from error
    for number, columns in enumerate(table.to_pylist()):
        yield f"{key}: {file}, row {number}", columns


def _mapped(path: Path) -> Any:
    """A Parquet file as a dataset that stays on disk; `datasets` keeps a copy in its cache, from which any row can be
    read for itself.
    """
    import datasets

    datasets.disable_progress_bars()  # every rank would draw its own
    return datasets.Dataset.from_parquet(str(path))


def _with_pictures(
    dataset: Any, folder: Path, place: str, images: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a dataset on disk, with Pictures in the place of images."""
    from datasets import Image

    columns = {name: dataset.select_columns([name]) for name in images}
    for name, column in columns.items():
        if isinstance(column.features[name], Image):
            columns[name] = column.cast_column(name, Image(decode=False))

    def cell(name: str, number: int) -> Any:
        return columns[name][number][name]

    for number, texts in enumerate(dataset.remove_columns(list(images))):
        where = f"{place}, row {number}"
        yield where, texts | {name: Picture(partial(cell, name, number), folder, f"{where}: {name}") for name in images}


def _dataset_rows(
    path: Path, split: str | None, file: str, key: str, images: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    from datasets import DatasetDict, load_from_disk

    try:
        dataset = load_from_disk(str(path))
    except FileNotFoundError:
        raise DataError(
            f"{key}: {file} is a folder, but no dataset that save_to_disk wrote; right is {FORMATS}"
        ) from None
    if isinstance(dataset, DatasetDict):
        splits = ", ".join(dataset)
        if split is None and len(dataset) > 1:
            raise DataError(f"{key}: {file} has the splits {splits}; name one, e.g. {path}:{next(iter(dataset))}")
        if split is not None and split not in dataset:
            raise DataError(f"{key}: {file}: there is no split {split!r}; it has {splits}")
        dataset = dataset[split if split is not None else next(iter(dataset))]
    elif split is not None:
        raise DataError(f"{key}: {file}: the dataset has no splits; right is {path}")
    _check_columns(dataset.column_names, f"{key}: {file}", images)
    if images:
        yield from _with_pictures(dataset, path, f"{key}: {file}", images)
        return
    for number, columns in enumerate(dataset):
        yield f"{key}: {file}, row {number}", columns


def _check_columns(columns: list[str], where: str, images: Sequence[str]) -> None:
    for name in ("prompt", *images):
        if name not in columns:
            raise DataError(f"{where} has no column {name!r}; it has {', '.join(columns) or 'none'}")


def _row(columns: dict[str, Any], where: str) -> PromptRow:
    if "prompt" not in columns:
        raise DataError(f"{where}: no 'prompt'; it has {', '.join(columns) or 'no keys'}")
    text = _text(columns["prompt"], "prompt", where)
    if not text.strip():
        raise DataError(f"{where}: the prompt is empty")
    negative = columns.get("negative_prompt")
    meta = {name: value for name, value in columns.items() if name not in ("prompt", "negative_prompt")}
    truth = _ground_truth(meta, text)
    meta.pop("ground_truth", None)
    if truth is not None:
        meta["ground_truth"] = truth
    return PromptRow(text, None if negative is None else _text(negative, "negative_prompt", where), meta)


def _ground_truth(meta: dict[str, Any], text: str) -> Any:
    """None where neither the row nor the prompt has one."""
    if meta.get("ground_truth") is not None:
        return meta["ground_truth"]
    model = meta.get("reward_model")
    if isinstance(model, dict) and model.get("ground_truth") is not None:
        return model["ground_truth"]
    quoted = _QUOTED.search(text)
    return quoted.group(1) if quoted else None


def _text(value: Any, name: str, where: str) -> str:
    """A text, or the content of a chat's last user message."""
    if isinstance(value, list):
        messages = [m for m in value if isinstance(m, dict) and m.get("role") == "user"]
        if not messages:
            raise DataError(f"{where}: {name} is a list without a user message; right is a text or [{{role, content}}]")
        value = messages[-1].get("content")  # not a text, where a message has parts: reported below
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is of type {_kind(value)}; right is a text, or a chat of texts")
    return value


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "object", list: "list", bool: "boolean", int: "number", float: "number", str: "text"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
