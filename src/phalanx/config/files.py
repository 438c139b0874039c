"""Files: kind and content of what is at a user's path, JSON, and atomic replacement of files."""

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.config.inside import write_inside

MOST_CONFIG = 1 << 18  # bytes of a config.yaml, of which a job writes about 10,000


def kind(path: Path) -> str | None:
    """Whether a path is a "file" or a "folder"; None if it does not exist.

    Raises OSError for anything else, such as a pipe, whose reading would block, for a cycle of symbolic links, and for
    an invalid name.
    """
    try:
        mode = path.expanduser().stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (RuntimeError, ValueError) as error:  # no such user's home; a null character
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if stat.S_ISDIR(mode):
        return "folder"
    if stat.S_ISREG(mode):
        return "file"
    raise OSError(errno.EINVAL, "neither a file nor a folder", str(path))


def read_bytes(path: Path, limit: int = -1) -> bytes:
    """The content of a regular file. Raises OSError if there is none, or if it has more than `limit` bytes."""
    form = kind(path)
    if form != "file":
        code = errno.ENOENT if form is None else errno.EISDIR
        raise OSError(code, os.strerror(code), str(path))
    with path.expanduser().open("rb") as file:
        content = file.read(limit + 1 if limit >= 0 else -1)
    if len(content) > limit >= 0:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


@contextmanager
def reading(what: str, kind: type[ValueError] = ValueError) -> Iterator[None]:
    """Turn an OSError of the block into an error of this kind, in one line: `what` cannot be read, and why."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what} cannot be read: {error.strerror}") from None


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file atomically, so that no reader sees a partial file. Raises OSError."""
    write_inside(path.parent, path.name, content)


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The object that a line of JSON contains; None for anything else, such as an incomplete line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _finite_number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None, *, finite: bool = False) -> Any:
    """Parse a JSON text. pairs: converts the key-value pairs of each object, see json.loads' object_pairs_hook.
    finite: refuse NaN and infinite numbers, which Python writes although JSON has none, and those too large.

    Raises json.JSONDecodeError, or another ValueError with one line.
    """
    try:
        number = _finite_number if finite else None
        value = json.loads(text, object_pairs_hook=pairs, parse_float=number, parse_constant=number)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:  # an integer with thousands of digits
        raise ValueError(str(error).partition(";")[0]) from None
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(f"{half} is half of a surrogate pair, which is not valid text") from None
    return value
