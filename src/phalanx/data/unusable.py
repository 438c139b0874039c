"""Rows of data files that cannot be used (data.unusable_rows)."""

import logging

from phalanx.data.data_files import DataError
from phalanx.distributed.launch_env import Launch
from phalanx.types import Prompt

logger = logging.getLogger(__name__)


def above_limit(part: str, size: str, key: str, limit: int) -> DataError:
    """The mistake of a part of a row whose size, such as `9 tokens`, is above the limit of the configuration key."""
    ways = "raise that, or set data.overlong_prompts to filter or truncate"
    return DataError(f"{part} has {size}, more than {key}={limit}; {ways}")


def context_of(row: Prompt, key: str) -> str:
    """The row's text for its teacher, in the column `key`. Raises DataError for a row without one."""
    text = row.meta.get(key)
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{row.place}: no text in the column {key}; see algorithm.context_key")
    return text


class UnusableRows:
    """Called with the reason why a row cannot be used: raises it if data.unusable_rows is `error`, and otherwise keeps
    it for `report`. key: the configuration key of the rows' files.
    """

    def __init__(self, key: str, choice: str) -> None:
        self.key, self.choice = key, choice
        self.reasons: list[str] = []

    def __call__(self, error: ValueError) -> None:
        if self.choice == "error":
            raise error
        self.reasons.append(str(error))

    def report(self, kept: int) -> None:
        """Warn of the rows that are left out, if any; `kept` rows remain. Raises DataError if that is none."""
        if not self.reasons:
            return
        lost, first = len(self.reasons), self.reasons[0].removeprefix(f"{self.key}: ")
        if not kept:
            raise DataError(f"{self.key}: none of its {lost} rows can be used, first: {first}")
        if Launch.from_env().rank == 0:
            text = "%s: %d of %d rows cannot be used and are left out (data.unusable_rows), first: %s"
            logger.warning(text, self.key, lost, lost + kept, first)
