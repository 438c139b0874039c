"""Lines that are added to a file while it is watched."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from phalanx.config.files import json_object
from phalanx.config.inside import open_inside

CHUNK = 1 << 20  # bytes read at once
MOST_LINE = 4 << 20  # bytes; a longer line is damaged


class GrowingFile:
    """The lines of JSON in a file of a run, each read once.

    Of more than `most` unread bytes only the last are read. A file that was replaced, or cut at its end, is read from
    its beginning, after a call of `restart`.
    """

    def __init__(self, folder: Path, name: str, most: int, restart: Callable[[], object]) -> None:
        self._folder, self._name, self._most, self._restart = folder, name, most, restart
        self._inode = self._offset = 0
        self._number = 0  # of the last line
        self.cut = False  # whether lines were skipped

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The number and the bytes of each new line that is not empty; no bytes for one that is too long. A last line
        without its end is taken if it is an object, and is otherwise left for the next call. Raises OSError.
        """
        with open_inside(self._folder, self._name) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset, self._number, self.cut = status.st_ino, 0, 0, False
                self._restart()
            skipped = max(status.st_size - self._offset - self._most, 0)
            self.cut |= skipped > 0
            position = file.seek(self._offset + skipped)
            rest, is_part = b"", skipped > 0  # is_part: the beginning of this line is not read, or too long
            while position < status.st_size and (data := file.read(min(CHUNK, status.st_size - position))):
                position += len(data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._number += 1
                    if not is_part and line.strip():
                        yield self._number, line
                    is_part = False
                if len(rest) > MOST_LINE:
                    if not is_part:
                        yield self._number + 1, b""
                    rest, is_part = b"", True
                self._offset = position - len(rest)
            if not is_part and json_object(rest) is not None:
                self._offset = position
                yield self._number + 1, rest
