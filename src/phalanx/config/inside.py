"""Files of a folder that somebody else may have written, such as a run's: no link leads out of it, nothing blocks.

A name is relative to the folder and must not leave it. No component of it may be a link; the folder itself may, because
the user named it. Only regular files are opened, without blocking, and at most `limit` bytes of them are read. New
content goes to a new file under a random name, which then replaces the old one, whatever that is. All functions raise
OSError.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

MOST_ENTRIES = 50_000  # of a folder that are listed
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open a file to read."""
    with _open_parent(folder, name) as (parent, last):
        return os.fdopen(_open_file(parent, last, os.O_RDONLY), "rb")


def append_inside(folder: Path, name: str, buffering: int = -1) -> BinaryIO:
    """Open a file to read and append; it is created if it is missing. `buffering`: see `open`; without it, a full disk
    may take only a part of what is written.
    """
    with _open_parent(folder, name) as (parent, last):
        return os.fdopen(_open_file(parent, last, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+b", buffering=buffering)


def read_inside(folder: Path, name: str, limit: int) -> bytes:
    """The content of a file. Raises OSError if it is larger than `limit` bytes."""
    with open_inside(folder, name) as file:
        content = file.read(limit + 1)  # not its size by stat, because it may grow meanwhile
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(folder / name))
    return content


def write_inside(folder: Path, name: str, content: str | bytes) -> None:
    """Replace a file atomically, so that no reader sees a part of it; texts as UTF-8, with ? for lone surrogates."""
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    with _open_parent(folder, name) as (parent, last):
        part = f".{secrets.token_hex(8)}.tmp"
        descriptor = os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=parent
        )
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(part, last, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=parent)
            raise


def make_inside(folder: Path, name: str) -> None:
    """Create a folder and its parents below `folder`, which exists."""
    with _open_parent(folder, f"{name}/.", make=True):
        pass


def list_inside(folder: Path, name: str = ".") -> list[tuple[str, bool]]:
    """The sorted names in a folder, and whether each is a folder; links are left out. Empty if there is no such folder,
    and at most MOST_ENTRIES.
    """
    entries = list[tuple[str, bool]]()
    with suppress(OSError), _open_parent(folder, f"{name}/.") as (parent, _), os.scandir(parent) as scan:
        for entry in scan:
            if len(entries) == MOST_ENTRIES:
                break
            if not entry.is_symlink():
                entries.append((entry.name, entry.is_dir(follow_symlinks=False)))
    return sorted(entries)


def status_inside(folder: Path, name: str) -> os.stat_result | None:
    """The status of a regular file or a folder; None if there is none."""
    try:
        with _open_parent(folder, name) as (parent, last):
            status = os.stat(last, dir_fd=parent, follow_symlinks=False)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) else None


@contextmanager
def _open_parent(folder: Path, name: str, make: bool = False) -> Iterator[tuple[int, str]]:
    """A descriptor of the folder in which `name` lies, and the last part of the name. make: create missing folders.

    Errors of the block are raised with the whole path, as errors of opening are.
    """
    *folders, last = name.split("/")
    descriptor = None
    try:
        if ".." in (*folders, last) or not last or name.startswith("/") or "\0" in name:
            raise OSError(errno.ENOENT, "it is not a name in this folder")
        descriptor = os.open(folder, _FOLDER)
        for part in folders:
            if make and part not in ("", "."):
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            inner = os.open(part or ".", _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor, last
    except UnicodeEncodeError as error:  # half of a surrogate pair, which no file name contains
        raise OSError(errno.EINVAL, str(error), str(folder / name)) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(folder / name)) from None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _open_file(parent: int, name: str, flags: int) -> int:
    """A descriptor of a regular file. Devices are not even opened, because some act when that happens."""
    with suppress(FileNotFoundError):
        _check_regular(os.stat(name, dir_fd=parent, follow_symlinks=False))
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=parent)
    try:
        _check_regular(os.fstat(descriptor))  # it may have been replaced in between
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "a link, which is not followed")
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
