"""Images in rows of data files for language models, as Pictures that are not read yet."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from phalanx.data.parquet import DataError
from phalanx.media.pictures import Picture, in_memory

COLUMNS = ("images", "image")  # default columns of images; the first one in a file is used
IMAGE_PARTS = ("image", "image_url", "input_image")  # types of a message's parts that are images, as of Qwen and OpenAI
_HOLDERS = ("image", "image_url", "path", "url")  # keys of such a part that hold the image itself
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


def take_held(row: dict[str, Any], column: str, folder: Path, where: str) -> None:
    """Move the images that the parts of a chat hold themselves, {type: image, image: ...} as of transformers, or
    {type: image_url, image_url: {url}}, into the row's tuple `images`, and leave parts {type: image} in their places.
    Other parts stay as they are. Raises DataError if the row has images in both places.
    """
    if not isinstance(row.get(column), list):
        return
    row[column], pictures = without_nulls(row[column]), list[Picture]()
    for message in row[column]:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            image = _part_image(part)
            if image is not None:
                pictures.append(Picture(partial(in_memory, image), folder, f"{where}: {column}, image {len(pictures)}"))
                part.clear()
                part["type"] = "image"
    if pictures and row.get("images"):
        raise DataError(f"{where}: the row has images in parts of {column} and in the column `images`; expected one")
    if pictures:
        row["images"] = tuple(pictures)


def _part_image(part: Any) -> Any:
    """The image that a part of a message holds, as a Picture's source returns it; None if it holds none, or more."""
    if not isinstance(part, dict) or part.get("type") not in IMAGE_PARTS or len(part) != 2:
        return None
    [(key, value)] = [(key, value) for key, value in part.items() if key != "type"]
    if isinstance(value, dict) and value.keys() == {"url"}:
        value = value["url"]
    is_image = isinstance(value, bytes) or (_is_image(value) and not isinstance(value, list))
    return value if key in _HOLDERS and is_image else None


def without_nulls(value: Any) -> Any:
    """Remove keys that are null, because in files with columns every row has the keys of all rows."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value


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


def counts_of(dataset: Any, name: str, null: int) -> Iterator[int]:
    """Number of images in each row of a dataset's column, `null` where it has none; no image is read."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for table in dataset.with_format("arrow").iter(batch_size=1000):
        values = table[name]
        if _is_list(values.type):
            counts = pc.fill_null(pc.list_value_length(values), null)
        else:
            there = pc.is_valid(values)
            if pa.types.is_struct(values.type):  # both of its fields may be null
                fields = [pc.is_valid(pc.struct_field(values, field.name)) for field in values.type]
                there = pc.and_(there, reduce(pc.or_, fields))
            counts = pc.if_else(there, 1, null)
        yield from counts.to_pylist()


def stored_cell(dataset: Any, name: str, number: int) -> Any:
    """The value of a dataset's column in row `number` as it is stored: an image stays a file."""
    return dataset.with_format("arrow")[number][name][0].as_py()


def stored(dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows of a dataset as they are stored: images anywhere in them stay files."""
    for table in dataset.with_format("arrow").iter(batch_size=1000):
        yield from table.to_pylist()


def in_table(rows: Iterable[Located], dataset: Any, folder: Path, column: str) -> Iterator[Located]:
    """The rows with a tuple of Pictures in `images`, from a dataset's column with one image or a list per row."""
    listed = _is_list(dataset.features.arrow_schema.field(column).type)

    def cell(number: int, i: int) -> Any:
        value = stored_cell(dataset, column, number)
        return value[i] if listed else value

    for number, ((where, row), count) in enumerate(zip(rows, counts_of(dataset, column, 0), strict=True)):
        pictures = []
        for i in range(count):
            name = f"{where}: {column}[{i}]" if listed else f"{where}: {column}"
            pictures.append(Picture(partial(cell, number, i), folder, name))
        yield where, {**row, "images": tuple(pictures)}
