"""Rows of Parquet files, in bounded memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Bytes that rows of a Parquet file may take in memory, plus GROWTH times the file's size: a few kB can repeat a value a
# million times. A row takes ROW bytes as a Prompt, besides its values.
UNPACKED, GROWTH, ROW = 2**27, 100, 512


class DataError(ValueError):
    """A data file that cannot be used. The message is one line that names the file and the line or row."""


@contextmanager
def reading_parquet(place: str) -> Iterator[None]:
    """Turn exceptions of pyarrow in the block into DataErrors."""
    import pyarrow as pa

    try:
        yield
    except DataError:
        raise
    # a text column may raise UnicodeDecodeError, which is a ValueError
    except (pa.ArrowException, OSError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"{place} is not a Parquet file: {first}") from error


def unpacked(source: Any, columns: list[str], limit: int, place: str) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file. Raises DataError once they take more than `limit` bytes."""
    import pyarrow as pa

    meta, longest, items = source.metadata, 0, 0
    for group in map(meta.row_group, range(meta.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            longest = max(longest, chunk.total_uncompressed_size)
            items = max(items, chunk.num_values if chunk.num_values > group.num_rows else 0)
    # no value is longer than its chunk and no list than its items, so that no batch takes more memory than the limit
    check_unpacked(4 * longest, limit, place)
    most = limit // (1 + 8 * longest + 40 * items)
    total, batches = 0, source.iter_batches(max(1, min(1024, most)), columns=columns)
    while True:
        with reading_parquet(place):
            batch = next(batches, None)
            if batch is None:
                return
            rows = batch.to_pylist()
            total += ROW * batch.num_rows
            for field, column in zip(batch.schema, batch.columns, strict=True):
                # a dictionary has each value once, and a list of numbers is larger in Python
                flat = not (pa.types.is_nested(field.type) or pa.types.is_dictionary(field.type))
                total += column.nbytes if flat else sum(_value_bytes(row[field.name]) for row in rows)
            check_unpacked(total, limit, place)
        yield from rows


def _value_bytes(value: Any) -> int:
    """The bytes that a value of a row takes in memory, roughly."""
    if isinstance(value, dict):
        return ROW + sum(map(_value_bytes, value.values()))
    if isinstance(value, list):
        return 64 + sum(map(_value_bytes, value))
    return 40 + (len(value) if isinstance(value, str | bytes) else 0)


def check_unpacked(size: int, limit: int, place: str) -> None:
    """Raise DataError for rows of more than `limit` bytes."""
    if size > limit:
        raise DataError(
            f"{place} has rows of more than {limit >> 20} MiB in memory, more than {GROWTH} times the size of the "
            "file: it repeats few values; leave repeated rows out"
        )
