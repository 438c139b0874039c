"""Files: what is at a path that somebody else wrote, its content, and files that are replaced at once."""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kind(path: Path) -> str | None:
    """ "file" or "folder"; None where there is nothing.

    Raises OSError for what is neither, such as a pipe, which would block, for a circle of links, and for a name that no
    file can have.
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


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; raises OSError where there is none."""
    form = kind(path)
    if form != "file":
        code = errno.ENOENT if form is None else errno.EISDIR
        raise OSError(code, os.strerror(code), str(path))
    return path.expanduser().read_bytes()


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file anew: a reader never sees a half. Raises OSError."""
    part = path.with_name(f"{path.name}.tmp")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.replace(path)


def json_object(text: str | bytes) -> dict[str, Any] | None:
    """The object in a line of JSON; None for anything else, such as half a line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value of a JSON text, with `pairs` of the keys and values of each object. Raises json.JSONDecodeError, or
    another ValueError of one line.
    """
    try:
        value = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:  # of an integer of thousands of digits
        raise ValueError(str(error).partition(";")[0]) from None
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):04x}"
            raise ValueError(f"{half} is half of a surrogate pair, which no text can hold") from None
    return value
