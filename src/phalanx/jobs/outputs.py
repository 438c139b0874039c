"""Places that a task writes to: what cannot be written is told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from phalanx.types import JobError


def check_place(path: Path, key: str, *, folder: bool = True) -> None:
    """Raise ValueError, with the `key` that names it, where nothing below a parent of the path can be made, or where
    the path, of a `folder`, is a file.
    """
    if folder and path.exists() and not path.is_dir():
        raise ValueError(f"{key}: '{path}' is a file; give a folder")
    parent = path.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ValueError(f"{key}: '{path}' cannot be made: '{parent}' is not a folder")


@contextmanager
def writing(path: Path, key: str) -> Iterator[None]:
    """The block writes to the path; JobError, in one line, where the system refuses."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{key}: '{error.filename or path}' cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # its own word for the system's refusal
        raise JobError(f"{key}: '{path}' cannot be written: {error}") from error
