"""Data files: rows of each supported format, and resolution of an entry such as a folder or a pattern to its files."""

import csv
import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from phalanx.config.files import kind, parse_json, read_bytes, reading
from phalanx.config.messages import cut, reason
from phalanx.data.hub import SCHEME, load_named, named
from phalanx.data.parquet import GROWTH, ROW, UNPACKED, check_unpacked, reading_parquet, unpacked
from phalanx.data.parquet import DataError as DataError
from phalanx.data.row_functions import made_rows
from phalanx.data.shown import (
    COLUMNS,
    Located,
    column_of,
    counts_of,
    holds_images,
    in_rows,
    in_table,
    stored,
    stored_cell,
)
from phalanx.media.pictures import Picture, in_memory

FORMATS = (
    "a .txt, .jsonl, .json, .csv or .parquet file, a folder or a pattern of such files, the folder of a Hugging "
    "Face dataset (folder:split for one split), a data set of the hub (hf://owner/name:split), or a function of yours "
    "that returns rows (path/to/file.py:function)"
)
CONVERSATIONS = "conversations"  # ShareGPT's column of chats, which is read for `messages`
LONGEST = 2**22  # characters of a prompt: a tokenizer would take minutes for longer ones
_ENDINGS = (".parquet", ".jsonl", ".csv")  # files that are used if an entry is a folder
_OF_DATASET = ("dataset_info.json", "dataset_dict.json", "state.json")  # files in a folder written by save_to_disk
_SHARD = re.compile(r"[-_.]?\d+[-_]of[-_]\d+$|^(part|shard|chunk)?[-_]?\d+$")  # the number of a part
# a file, a dataset's folder and its split, a file of code and its function, or the current folder and an entry hf://
Source = tuple[Path, str | None]
T = TypeVar("T")
_KINDS = {
    bool: "boolean",
    int: "number",
    float: "number",
    dict: "object",
    list: "list",
    str: "text",
    type(None): "null",
}


def locate(file: str, key: str) -> list[tuple[str, Source]]:
    """The files of an entry, each with its name for messages."""
    places = []
    for path, split in _find_sources(file, key):
        is_entry = split is not None or path == Path(file).expanduser()
        places.append((file if is_entry else str(path), (path, split)))
    return places


def _find_sources(file: str, key: str) -> list[Source]:
    """The files of an entry: the file itself, those of a folder or a pattern sorted by name, or a dataset's folder, of
    which `folder:split` selects one split.
    """
    if file.startswith(SCHEME):
        named(file, f"{key}: {file}")
        return [(Path(), file)]
    if not file.strip():  # an empty path would be the current folder
        raise DataError(f"{key}: {file!r} names no file; expected {FORMATS}")
    path = Path(file)
    with reading(f"{key}: {cut(file)}", DataError):
        form = kind(path)
        if form == "file":
            return [(path.expanduser(), None)]
        if form == "folder":
            return _in_folder(path.expanduser(), None, f"{key}: {file}")
        folder, _, split = file.rpartition(":")
        if folder and kind(Path(folder)) == "folder":
            return _in_folder(Path(folder).expanduser(), split, f"{key}: {file}")
        if folder.endswith(".py") and kind(Path(folder)) == "file":
            return [(Path(folder).expanduser(), split)]
        path = path.expanduser()
        if any(mark in file for mark in "*?["):
            matches = [Path(name) for name in sorted(glob.glob(str(path)))]
            if not matches:
                raise DataError(f"{key}: {file} matches no file")
            return [(match, None) for match in matches]
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, 1)
    hint = f"did you mean {path.parent / near[0]}?" if near else f"expected {FORMATS}"
    raise DataError(f"{key}: {file} does not exist; {hint}")


def _in_folder(folder: Path, split: str | None, place: str) -> list[Source]:
    """The folder itself if it is a dataset; otherwise the files of one split in the folder or its subfolder `data`."""
    inside = [folder, folder / "data"]
    files: list[Path] = []
    while inside and not files and not any((folder / name).exists() for name in _OF_DATASET):
        files = [path for path in sorted(inside.pop(0).glob("*")) if path.suffix in _ENDINGS]
    if not files:
        return [(folder, split)]
    endings = sorted({path.suffix for path in files})
    pattern = f"{files[0].parent}/*{endings[0]}"
    if len(endings) > 1:
        raise DataError(f"{place} has {' and '.join(endings)} files; name those of one kind, e.g. {pattern}")
    splits: dict[str, list[Source]] = {}
    for path in files:
        splits.setdefault(without_number(path), []).append((path, None))
    return _select_split(splits, split, place, folder, f", or all, {pattern}")


def _select_split(splits: Mapping[str, T], split: str | None, place: str, folder: Path, all_: str = "") -> T:
    """The split of this name in a folder, or the only one. `all_`: how to name all splits, the end of a message."""
    first = next(iter(splits))
    if split is None and len(splits) > 1:
        raise DataError(f"{place} has the splits {', '.join(splits)}; name one, e.g. {folder}:{first}{all_}")
    if split is not None and split not in splits:
        raise DataError(f"{place}: there is no split {split!r}; it has {', '.join(splits)}")
    return splits[first if split is None else split]


def without_number(path: Path) -> str:
    """The name of a file without its suffix and part number, such as train for train-00000-of-00002.parquet."""
    return _SHARD.sub("", path.stem)


def read(
    path: Path,
    split: str | None,
    place: str,
    images: Sequence[str],
    prompt: str,
    drop: Callable[[DataError], None],
    *,
    texts: bool,
    image_key: str | None = None,
) -> Iterator[Located]:
    """Iterate over the rows of a file, or of a function in it.

    place: the file's name in messages.
    images: columns with one image each; a column's name in the file may also be the plural.
    drop: called with the reason why a line cannot be used; may raise it.
    texts: whether the job trains a language model. Then rows of a file with the column `image_key` (None: `images`, or
        else `image`) have a tuple of Pictures in `images`; other columns of images are left out to save memory.
    """
    shown = (COLUMNS if image_key is None else (image_key,)) if texts else ()
    if split is None or not split.startswith(SCHEME):
        _check_regular(path, place)
    if path.is_dir():
        dataset = load_dataset(path, split, place)
        return _table_rows(dataset, path, place, images, prompt, shown)
    if path.suffix == ".txt":
        if images:
            raise DataError(f"{place} is plain text; images ({', '.join(images)}) come in the other formats")
        return ((where, {"prompt": line}) for where, line in _text_lines(path, place, drop))
    made = made_rows(path, split, place, drop) if path.suffix == ".py" and split is not None else None
    if made is not None or path.suffix in (".jsonl", ".json"):
        rows = _object_rows(made or json_objects(path, place, drop), path.parent, images, drop)
        return in_rows(rows, path.parent, shown)
    if path.suffix == ".csv":
        cells = _csv_rows(path, place, (prompt, *images), drop)
        return in_rows(_object_rows(cells, path.parent, images, drop), path.parent, shown)
    if path.suffix == ".parquet":
        return _parquet_rows(path, place, images, prompt, shown)
    ending = f"ends in {path.suffix}" if path.suffix else "has no ending"
    raise DataError(f"{place} {ending}; expected {FORMATS}")


def _raise_error(error: DataError) -> None:
    raise error


def _check_regular(path: Path, place: str) -> None:
    """Raise DataError for a pipe, a socket or a device, of which a read might never end, also in a dataset's folder."""
    with reading(place, DataError):
        for file in (path, *(path.rglob("*") if path.is_dir() else ())):
            kind(file)


def _text_lines(path: Path, place: str, drop: Callable[[DataError], None]) -> Iterator[tuple[str, str]]:
    """Iterate over the lines that are not blank, each with its place. drop: see `read`."""
    with reading(place, DataError):
        content = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    # not str.splitlines, because separators other than newlines may be part of a prompt
    for number, raw in enumerate(content.split(b"\n"), 1):
        where = f"{place}:{number}"
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            byte = f"byte 0x{raw[error.start]:02x}"
            drop(DataError(f"{where}: not UTF-8 ({byte}); save the file as UTF-8"))
            continue
        if line:
            yield where, line


def json_objects(path: Path, place: str, drop: Callable[[DataError], None] = _raise_error) -> Iterator[Located]:
    """Iterate over the objects of a JSON Lines file, or of a .json file that is one list of objects, each with its
    place. drop: called for a line or an item that is no object.
    """
    expected = 'expected one object per line, {"prompt": "..."}'
    listed = _json_list(path, place) if path.suffix == ".json" else None
    if listed is not None:
        for number, value in enumerate(listed):
            if isinstance(value, dict):
                yield f"{place}, row {number}", value
            else:
                drop(DataError(f"{place}, row {number}: JSON of type {kind_of(value)}; expected an object"))
        return
    for where, line in _text_lines(path, place, drop):
        try:
            value = parse_json(line, _named_once)
        except json.JSONDecodeError as error:
            drop(DataError(f"{where}: not JSON ({error.msg} at column {error.colno}); {expected}"))
        except ValueError as error:
            drop(DataError(f"{where}: not JSON ({error}); {expected}"))
        else:
            if isinstance(value, dict):
                yield where, value
            else:
                drop(DataError(f"{where}: JSON of type {kind_of(value)}; {expected}"))


def _json_list(path: Path, place: str) -> list[Any] | None:
    """The list that a .json file contains; None if it does not begin with one. Raises DataError for a damaged list."""
    text = "\n".join(line for _, line in _text_lines(path, place, _raise_error))
    if not text.startswith("["):
        return None
    try:
        return list(parse_json(text, _named_once))
    except ValueError as error:
        raise DataError(f"{place}: not a JSON list ({' '.join(str(error).split())})") from None


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a duplicate key, of which json would keep only the last value."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"the key {_first_duplicate([name for name, _ in pairs])!r} occurs twice")
    return value


def _first_duplicate(names: Sequence[str]) -> str | None:
    """The first name that occurs twice; None if there is none."""
    return next((name for i, name in enumerate(names) if name in names[:i]), None)


def _object_rows(
    rows: Iterable[Located], folder: Path, images: Sequence[str], drop: Callable[[DataError], None]
) -> Iterator[Located]:
    for where, value in rows:
        for name in images:
            if name not in value and f"{name}s" in value:
                value[name] = value.pop(f"{name}s")
        missing = next((name for name in images if name not in value), None)
        if missing is not None:
            drop(DataError(f"{where}: no {missing!r}; it has {', '.join(value) or 'no keys'}"))
            continue
        for name in images:
            value[name] = Picture(partial(in_memory, value[name]), folder, f"{where}: {name}")
        yield where, value


def _csv_rows(path: Path, place: str, wanted: Sequence[str], drop: Callable[[DataError], None]) -> Iterator[Located]:
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST))  # process-wide, 2**17 by default
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            _check_columns(reader.fieldnames or [], place, wanted)
            for row in reader:
                where = f"{place}:{reader.line_num}"
                if None in row:
                    drop(DataError(f"{where}: more cells than the header has columns; expected quotes around commas"))
                    continue
                prompt = {wanted[0]: row[wanted[0]] or ""}
                yield where, {name: cell or None for name, cell in row.items()} | prompt
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{place}:{reader.reader.line_num}: not CSV ({error})") from None


def _parquet_rows(
    path: Path, place: str, images: Sequence[str], prompt: str, shown: Sequence[str]
) -> Iterator[Located]:
    import pyarrow.parquet as pq

    with reading_parquet(place):
        source = pq.ParquetFile(path)
        fields = source.schema_arrow
        _check_columns(fields.names, place, (prompt, *_image_columns(images, fields.names)))
        limit = UNPACKED + GROWTH * path.stat().st_size
        on_disk = bool(images) or column_of(fields, shown) is not None
        wanted = [field.name for field in fields if not (shown and holds_images(field.type))]
        if not on_disk:
            return _number_rows(unpacked(source, wanted, limit, place), place)
        check_unpacked(ROW * source.metadata.num_rows, limit, place)
        rows = _open_parquet(path, place)
    return _table_rows(rows, path.parent, place, images, prompt, shown)


def _image_columns(images: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The names of the columns of images in the file, which may be plurals."""
    return [name if name in columns or f"{name}s" not in columns else f"{name}s" for name in images]


def _open_parquet(path: Path, place: str) -> Any:
    """A Parquet file as a dataset on disk. `datasets` keeps a copy in its cache that allows reading single rows."""
    import datasets

    datasets.disable_progress_bars()  # every rank would show one
    try:
        return datasets.Dataset.from_parquet(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if isinstance(cause, OSError) and cause.errno is not None:  # Arrow's own errors have no number
            raise DataError(
                f"{place}: its copy in the cache of datasets, {datasets.config.HF_DATASETS_CACHE}, cannot be written: "
                f"{cause.strerror}; set the environment variable HF_DATASETS_CACHE to a folder with space, or name a "
                "folder that save_to_disk wrote"
            ) from error
        raise DataError(f"{place} is damaged: {reason(cause)}") from error


def _number_rows(rows: Iterable[dict[str, Any]], place: str) -> Iterator[Located]:
    return ((f"{place}, row {number}", row) for number, row in enumerate(rows))


def with_pictures(dataset: Any, folder: Path, place: str, images: Sequence[str]) -> Iterator[Located]:
    """Iterate over the rows of a dataset on disk, with Pictures in place of images."""
    for name, column in zip(images, _image_columns(images, dataset.column_names), strict=True):
        if name != column:
            dataset = dataset.rename_column(column, name)
    columns = {name: dataset.select_columns([name]) for name in images}
    lengths = {name: list(counts_of(columns[name], name, 1)) for name in images}
    for number, (where, texts) in enumerate(_number_rows(dataset.remove_columns(list(images)), place)):
        pictures = {}
        for name in images:
            source = partial(stored_cell, columns[name], name, number)
            pictures[name] = Picture(source, folder, f"{where}: {name}", lengths[name][number])
        yield where, {**texts, **pictures}


def load_dataset(path: Path, split: str | None, place: str) -> Any:
    """The dataset in a Hugging Face dataset folder, or one split of it, or a dataset of the hub."""
    from datasets import DatasetDict, load_from_disk

    if split is not None and split.startswith(SCHEME):
        return load_named(split, place)
    try:
        dataset = load_from_disk(str(path))
    except FileNotFoundError:
        raise DataError(f"{place} is a folder, but not a dataset written by save_to_disk; expected {FORMATS}") from None
    except Exception as error:  # `datasets` may raise anything for damaged JSON files
        raise DataError(f"{place}: the dataset is damaged: {reason(error)}") from error
    if isinstance(dataset, DatasetDict):
        return _select_split(dataset, split, place, path)
    if split is not None:
        raise DataError(f"{place}: the dataset has no splits; expected {path}")
    return dataset


def _table_rows(
    dataset: Any, folder: Path, place: str, images: Sequence[str], prompt: str, shown: Sequence[str]
) -> Iterator[Located]:
    """Iterate over the rows of a dataset on disk; see `read`."""
    _check_columns(dataset.column_names, place, (prompt, *_image_columns(images, dataset.column_names)))
    if images:
        return with_pictures(dataset, folder, place, images)
    if not shown:
        return _number_rows(dataset, place)
    schema = dataset.features.arrow_schema
    column = column_of(schema, shown)
    left_out = [field.name for field in schema if field.name == column or holds_images(field.type)]
    rows = _number_rows(stored(dataset.remove_columns(left_out)), place)
    return rows if column is None else in_table(rows, dataset.select_columns([column]), folder, column)


def _check_columns(columns: Sequence[str], place: str, wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in columns and (name != "messages" or CONVERSATIONS not in columns):
            raise DataError(f"{place} has no column {name!r}; it has {', '.join(columns) or 'none'}")
    if (repeated := _first_duplicate(columns)) is not None:
        raise DataError(f"{place} has the column {repeated!r} twice; rename one of them")


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    return _KINDS.get(type(value), type(value).__name__)
