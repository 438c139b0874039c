"""Data files: the rows of each format, and the files that an entry of a list of files means."""

import csv
import glob
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.config.files import kind, parse_json, read_bytes
from phalanx.config.messages import cut, reason
from phalanx.media.pictures import Picture

FORMATS = (
    "a .txt, .jsonl, .csv or .parquet file, a folder or a pattern of such files, or the folder of a Hugging Face "
    "dataset (folder:split for one split)"
)
_ENDINGS = (".parquet", ".jsonl", ".csv")  # of the files of a folder
_OF_DATASET = ("dataset_info.json", "dataset_dict.json", "state.json")  # files in a folder written by save_to_disk
_SHARD = re.compile(r"[-_.]?\d+[-_]of[-_]\d+$|^(part|shard|chunk)?[-_]?\d+$")  # the end of a name that counts parts
Located = tuple[str, dict[str, Any]]  # a row's place, for messages, and its columns
Source = tuple[Path, str | None]  # a file, or a dataset's folder and its split
_IMAGES = ("images", "image")  # columns of images that a language model reads
_KINDS = {
    bool: "boolean",
    int: "number",
    float: "number",
    dict: "object",
    list: "list",
    str: "text",
    type(None): "null",
}


class DataError(ValueError):
    """A data file that cannot be used; the message is one line, with the file and line or row."""


def locate(file: str, key: str) -> list[Source]:
    """The files that an entry means: itself, those of a folder or a pattern in the order of their names, or a dataset's
    folder, `folder:split` for one split.
    """
    path = Path(file)
    try:
        form = kind(path)
        if form == "file":
            return [(path.expanduser(), None)]
        if form == "folder":
            return _in_folder(path.expanduser(), None, f"{key}: {file}")
        folder, _, split = file.rpartition(":")
        if folder and kind(Path(folder)) == "folder":
            return _in_folder(Path(folder).expanduser(), split, f"{key}: {file}")
        path = path.expanduser()
        if any(mark in file for mark in "*?["):
            matches = [Path(name) for name in sorted(glob.glob(str(path)))]
            if not matches:
                raise DataError(f"{key}: {file} matches no file")
            return [(match, None) for match in matches]
    except OSError as error:
        raise DataError(f"{key}: {cut(file)} cannot be read: {error.strerror}") from None
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, 1)
    hint = f"did you mean {path.parent / near[0]}?" if near else f"expected {FORMATS}"
    raise DataError(f"{key}: {file} does not exist; {hint}")


def _in_folder(folder: Path, split: str | None, place: str) -> list[Source]:
    """A dataset's folder as it is; otherwise the files in a folder, or in its `data`, of one split."""
    inside = [folder, folder / "data"]
    files: list[Path] = []
    while inside and not files and not any((folder / name).exists() for name in _OF_DATASET):
        files = [path for path in sorted(inside.pop(0).glob("*")) if path.suffix in _ENDINGS]
    if not files:
        return [(folder, split)]
    endings = sorted({path.suffix for path in files})
    every = f"{files[0].parent}/*{endings[0]}"
    if len(endings) > 1:
        raise DataError(f"{place} has {' and '.join(endings)} files; name those of one kind, e.g. {every}")
    splits: dict[str, list[Source]] = {}
    for path in files:
        splits.setdefault(without_number(path), []).append((path, None))
    if split is None and len(splits) > 1:
        first = f"{folder}:{next(iter(splits))}"
        raise DataError(f"{place} has the splits {', '.join(splits)}; name one, e.g. {first}, or all, {every}")
    if split is not None and split not in splits:
        raise DataError(f"{place}: there is no split {split!r}; it has {', '.join(splits)}")
    return splits[split] if split is not None else next(iter(splits.values()))


def without_number(path: Path) -> str:
    """The name of a file without ending, and without the number of a part such as train-00000-of-00002."""
    return _SHARD.sub("", path.stem)


def read(
    path: Path,
    split: str | None,
    place: str,
    images: Sequence[str],
    prompt: str,
    *,
    texts: bool,
    image_key: str | None = None,
) -> Iterator[Located]:
    """The rows of a file, of which messages say that it is at `place`.

    `images` are columns with an image each, which may also be called by its plural. For jobs on `texts`, rows of a file
    with the column `image_key` (None: `images`, or else `image`) have a tuple of Pictures in `images`, as many as each
    shows; other columns of images are left out, as they would fill the memory.
    """
    shown = (_IMAGES if image_key is None else (image_key,)) if texts else ()
    if path.is_dir():
        dataset = _dataset(path, split, place)
        return _table_rows(dataset, path, place, images, prompt, shown)
    if path.suffix == ".txt":
        if images:
            raise DataError(f"{place} is plain text; images ({', '.join(images)}) come in the other formats")
        return ((where, {"prompt": line}) for where, line in _lines(path, place))
    if path.suffix == ".jsonl":
        return _shown(_json_rows(path, place, images), path.parent, shown)
    if path.suffix == ".csv":
        return _shown(_csv_rows(path, place, images, prompt), path.parent, shown)
    if path.suffix == ".parquet":
        return _parquet_rows(path, place, images, prompt, shown)
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


def json_objects(path: Path, place: str) -> Iterator[Located]:
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
            raise DataError(f"{where}: JSON of type {kind_of(value)}; {expected}")
        yield where, value


def _json_rows(path: Path, place: str, images: Sequence[str]) -> Iterator[Located]:
    for where, value in json_objects(path, place):
        for name in images:
            if name not in value and f"{name}s" in value:
                value[name] = value.pop(f"{name}s")
            if name not in value:
                raise DataError(f"{where}: no {name!r}; it has {', '.join(value) or 'no keys'}")
            value[name] = Picture(partial(_given, value[name]), path.parent, f"{where}: {name}")
        yield where, value


def _csv_rows(path: Path, place: str, images: Sequence[str], prompt: str) -> Iterator[Located]:
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


def _shown(rows: Iterable[Located], folder: Path, names: Sequence[str]) -> Iterator[Located]:
    """The rows with a tuple of Pictures in `images`, where one of the columns `names` has images."""
    if not names:
        return iter(rows)
    rows = list(rows)
    column = next((name for name in names if any(_is_image(row.get(name)) for _, row in rows)), None)
    return iter(rows) if column is None else _with_tuples(rows, folder, column)


def _with_tuples(rows: Iterable[Located], folder: Path, column: str) -> Iterator[Located]:
    for where, row in rows:
        value = row.pop(column, None)
        pictures = []
        for i, item in enumerate(value if isinstance(value, list) else []):
            pictures.append(Picture(partial(_given, item), folder, f"{where}: {column}[{i}]"))
        if value is not None and not isinstance(value, list):
            pictures.append(Picture(partial(_given, value), folder, f"{where}: {column}"))
        yield where, {**row, "images": tuple(pictures)}


def _is_image(value: Any) -> bool:
    """Whether a value of JSON may stand for an image, or for several."""
    return isinstance(value, (str, dict)) or (isinstance(value, list) and any(map(_is_image, value)))


def _parquet_rows(
    path: Path, place: str, images: Sequence[str], prompt: str, shown: Sequence[str]
) -> Iterator[Located]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        source = pq.ParquetFile(path)
        fields = source.schema_arrow
        _check_columns(fields.names, place, (prompt, *_named(images, fields.names)))
        on_disk = bool(images) or _column(fields, shown) is not None
        wanted = [field.name for field in fields if not (shown and _holds_images(field.type))]
        rows = _mapped(path) if on_disk else source.read(columns=wanted).to_pylist()
    # UnicodeDecodeError, a ValueError, comes from a text column
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{place} is not a Parquet file: {first}") from error
    return _table_rows(rows, path.parent, place, images, prompt, shown) if on_disk else _numbered(rows, place)


def _holds_images(type_: Any) -> bool:
    """Whether an Arrow column is of images as Hugging Face stores them, {bytes, path} each, or of lists of them."""
    import pyarrow as pa

    if _is_list(type_):
        return _holds_images(type_.value_type)
    return pa.types.is_struct(type_) and {"bytes", "path"} >= {field.name for field in type_} >= {"bytes"}


def _column(schema: Any, names: Sequence[str]) -> str | None:
    """The first of the columns `names` of an Arrow schema that may hold images: their files, or paths of these."""
    import pyarrow as pa

    for name in names:
        if name not in schema.names:
            continue
        type_ = schema.field(name).type
        while _is_list(type_):
            type_ = type_.value_type
        if _holds_images(type_) or pa.types.is_string(type_) or pa.types.is_binary(type_):
            return name
    return None


def _is_list(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def _named(images: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The names of the columns of images, of which a plural may stand for each."""
    return [name if name in columns or f"{name}s" not in columns else f"{name}s" for name in images]


def _mapped(path: Path) -> Any:
    """A Parquet file as a dataset that stays on disk.

    `datasets` keeps a copy in its cache, from which it can read a single row.
    """
    import datasets

    datasets.disable_progress_bars()  # every rank would draw its own
    return datasets.Dataset.from_parquet(str(path))


def _numbered(rows: Iterable[dict[str, Any]], place: str) -> Iterator[Located]:
    return ((f"{place}, row {number}", row) for number, row in enumerate(rows))


def _with_pictures(dataset: Any, folder: Path, place: str, images: Sequence[str]) -> Iterator[Located]:
    """The rows of a dataset on disk, with Pictures in place of images."""
    for name, column in zip(images, _named(images, dataset.column_names), strict=True):
        if name != column:
            dataset = dataset.rename_column(column, name)
    columns = {name: _undecoded(dataset.select_columns([name])) for name in images}

    def cell(name: str, number: int) -> Any:
        return columns[name][number][name]

    for number, (where, texts) in enumerate(_numbered(dataset.remove_columns(list(images)), place)):
        pictures = {name: Picture(partial(cell, name, number), folder, f"{where}: {name}") for name in images}
        yield where, {**texts, **pictures}


def _undecoded(dataset: Any) -> Any:
    """A dataset whose images are what is stored of them."""
    from datasets import Image, List

    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset


def _dataset(path: Path, split: str | None, place: str) -> Any:
    """A Hugging Face dataset folder, or the split of it."""
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
    return dataset


def _table_rows(
    dataset: Any, folder: Path, place: str, images: Sequence[str], prompt: str, shown: Sequence[str]
) -> Iterator[Located]:
    """The rows of a dataset on disk; see `read`."""
    _check_columns(dataset.column_names, place, (prompt, *_named(images, dataset.column_names)))
    if images:
        return _with_pictures(dataset, folder, place, images)
    if not shown:
        return _numbered(dataset, place)
    schema = dataset.features.arrow_schema
    column = _column(schema, shown)
    left_out = [field.name for field in schema if field.name == column or _holds_images(field.type)]
    rows = _numbered(dataset.remove_columns(left_out), place)
    return rows if column is None else _with_stored(rows, dataset.select_columns([column]), folder, column)


def _with_stored(rows: Iterable[Located], dataset: Any, folder: Path, column: str) -> Iterator[Located]:
    """The rows with a tuple of Pictures in `images`, of which a dataset on disk has one or a list in each row."""
    dataset = _undecoded(dataset)
    listed = _is_list(dataset.features.arrow_schema.field(column).type)

    def cell(number: int, i: int) -> Any:
        value = dataset[number][column]
        return value[i] if listed else value

    for number, ((where, row), count) in enumerate(zip(rows, _counts(dataset, column, listed), strict=True)):
        pictures = []
        for i in range(count):
            name = f"{where}: {column}[{i}]" if listed else f"{where}: {column}"
            pictures.append(Picture(partial(cell, number, i), folder, name))
        yield where, {**row, "images": tuple(pictures)}


def _counts(dataset: Any, column: str, listed: bool) -> Iterator[int]:
    """The number of images of each row, without reading any."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for batch in dataset.with_format("arrow").iter(batch_size=1024):
        values = batch[column]
        if listed:
            counts = pc.fill_null(pc.list_value_length(values), 0)
        elif pa.types.is_struct(values.type):  # of which both parts may be null
            there = [pc.is_valid(pc.struct_field(values, field.name)) for field in values.type]
            counts = pc.and_(pc.is_valid(values), there[0] if len(there) == 1 else pc.or_(*there))
        else:
            counts = pc.is_valid(values)
        yield from map(int, counts.to_pylist())


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


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    return _KINDS.get(type(value), type(value).__name__)
