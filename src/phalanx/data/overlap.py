"""Prompts that are held out, and are among those that are trained all the same."""

import logging
from collections.abc import Callable, Hashable, Iterable

from phalanx.data.prompts import PromptRow
from phalanx.types import Prompt

logger = logging.getLogger(__name__)


def held_out_overlap(
    train: Iterable[PromptRow | Prompt], val: Iterable[PromptRow | Prompt], image: str | None = None
) -> int:
    """Count the validation prompts that are training prompts as well, and warn if there are any.

    With a column `image`, only those with the same image. Raises ValueError for an image that cannot be read.
    """
    held_out = list(val)
    seen, same = _common(list(train), held_out, lambda row: row.text.strip())
    if image is not None:  # by the files' sizes first: reading all images takes long
        seen, same = _common(seen, same, lambda row: (row.text.strip(), row.meta[image].file_size))
        seen, same = _common(seen, same, lambda row: (row.text.strip(), row.meta[image].digest))
    overlap = len(same)
    if overlap:
        logger.warning(
            "%d of %d validation prompts are training prompts as well; they do not measure generalization",
            overlap,
            len(held_out),
        )
    return overlap


_Rows = list[PromptRow | Prompt]


def _common(some: _Rows, others: _Rows, name: Callable[[PromptRow | Prompt], Hashable]) -> tuple[_Rows, _Rows]:
    """The rows of each list whose name occurs in the other list as well."""
    both = set(map(name, some)) & set(map(name, others))
    return [row for row in some if name(row) in both], [row for row in others if name(row) in both]
