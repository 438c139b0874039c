"""Checks and one-line errors for the paths to which a task writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from phalanx.types import JobError


def check_place(path: Path, key: str, *, folder: bool = True) -> None:
    """Raise ValueError if `path` cannot be created because one of its parents is a file, or if it is to be a folder and
    is a file. `key` is the configuration key, for the message.
    """
    if folder and path.exists() and not path.is_dir():
        raise ValueError(f"{key}: '{path}' is a file; give a folder")
    parent = path.parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        raise ValueError(f"{key}: '{path}' cannot be created: '{parent}' is not a folder")


def place_in_run(checkpoint: Path, kind: str, policy: str) -> Path:
    """The default folder for output about a checkpoint, below its run's folder, which may be somebody else's. Raises
    ValueError if a link is in the way, which may lead anywhere.
    """
    place = checkpoint.parent.parent
    for part in (kind, policy, checkpoint.name):
        place = place / part
        refuse_link(place)
    return place


def refuse_link(path: Path) -> None:
    """Raise ValueError if a folder in somebody else's folder is a link."""
    if path.is_symlink():
        raise ValueError(f"output_dir: '{path}' is a link; give the folder to write to")


@contextmanager
def writing(path: Path, key: str) -> Iterator[None]:
    """A context that writes to `path`. Raises JobError, with one line, if the operating system reports an error."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{key}: '{error.filename or path}' cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:  # safetensors raises it in place of OSError
        raise JobError(f"{key}: '{path}' cannot be written: {error}") from error
