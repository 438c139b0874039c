"""Images in rows of data files for language models, as Pictures that are not read yet."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.media.pictures import Picture, in_memory

COLUMNS = ("images", "image")  # default columns of images; the first one in a file is used
Located = tuple[str, dict[str, Any]]  # a row's place for messages, and its columns


def in_rows(rows: Iterable[Located], folder: Path, names: Sequence[str]) -> Iterator[Located]:
    """The rows, with a tuple of Pictures in `images` if one of the columns `names` contains images."""
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
            pictures.append(Picture(partial(in_memory, item), folder, f"{where}: {column}[{i}]"))
        if value is not None and not isinstance(value, list):
            pictures.append(Picture(partial(in_memory, value), folder, f"{where}: {column}"))
        yield where, {**row, "images": tuple(pictures)}


def _is_image(value: Any) -> bool:
    """Whether a JSON value may represent an image or several."""
    if isinstance(value, list):
        return any(map(_is_image, value))
    return isinstance(value, str) or (isinstance(value, dict) and {"bytes", "path"} >= value.keys() > set())


def column_of(schema: Any, names: Sequence[str]) -> str | None:
    """The first of the columns `names` in an Arrow schema that may contain images: files or paths of files."""
    import pyarrow as pa

    for name in names:
        if name not in schema.names:
            continue
        type_ = schema.field(name).type
        while _is_list(type_):
            type_ = type_.value_type
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        if holds_images(type_) or any(is_kind(type_) for is_kind in kinds):
            return name
    return None


def holds_images(type_: Any) -> bool:
    """Whether an Arrow column contains images as stored by Hugging Face, {bytes, path} each, or lists of them."""
    import pyarrow as pa

    if _is_list(type_):
        return holds_images(type_.value_type)
    return pa.types.is_struct(type_) and {"bytes", "path"} >= {field.name for field in type_} >= {"bytes"}


def _is_list(type_: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def lengths_of(dataset: Any, name: str) -> list[int]:
    """Number of images in each row of a dataset's column; only the lengths of lists are read."""
    import pyarrow.compute as pc

    lengths: list[int] = []
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        column = table[name]
        lengths += pc.list_value_length(column).fill_null(1).to_pylist() if _is_list(column.type) else [1] * len(column)
    return lengths


def undecoded(dataset: Any) -> Any:
    """A dataset whose images are not decoded."""
    from datasets import Image, List

    for name, feature in dataset.features.items():
        if isinstance(feature, Image):
            dataset = dataset.cast_column(name, Image(decode=False))
        elif isinstance(feature, List) and isinstance(feature.feature, Image):
            dataset = dataset.cast_column(name, List(Image(decode=False)))
    return dataset


def in_table(rows: Iterable[Located], dataset: Any, folder: Path, column: str) -> Iterator[Located]:
    """The rows with a tuple of Pictures in `images`, from a dataset's column with one image or a list per row."""
    dataset = undecoded(dataset)
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
    """Number of images of each row, without reading any."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for batch in dataset.with_format("arrow").iter(batch_size=1024):
        values = batch[column]
        if listed:
            counts = pc.fill_null(pc.list_value_length(values), 0)
        elif pa.types.is_struct(values.type):  # both of its fields may be null
            there = [pc.is_valid(pc.struct_field(values, field.name)) for field in values.type]
            counts = pc.and_(pc.is_valid(values), there[0] if len(there) == 1 else pc.or_(*there))
        else:
            counts = pc.is_valid(values)
        yield from map(int, counts.to_pylist())
