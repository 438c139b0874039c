"""Rows of a user's function, an entry `path/to/file.py:function` of the data files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import extract_tb

from phalanx.config.messages import reason, told_as
from phalanx.config.registry import resolve_object
from phalanx.data.parquet import DataError
from phalanx.data.shown import Located


def made_rows(path: Path, name: str, place: str, drop: Callable[[DataError], None]) -> Iterator[Located]:
    """The rows that a user's function returns or yields, each with its place; every rank calls it."""
    with told_as(DataError):
        function = resolve_object(f"{path}:{name}", place.partition(":")[0], "function")
    try:
        for number, row in enumerate(function()):
            if isinstance(row, dict):
                yield f"{place}, row {number}", dict(row)
            else:
                drop(
                    DataError(f"{place}, row {number}: {type(row).__name__}; expected a dict with the columns of a row")
                )
    except DataError:
        raise
    except Exception as error:  # whatever the user's code raises
        theirs = [frame.lineno for frame in extract_tb(error.__traceback__) if Path(frame.filename) == path.resolve()]
        line = f", line {theirs[-1]}" if theirs else ""
        raise DataError(f"{place}{line}: {reason(error)}") from error
