"""Detection of validation prompts that are also training prompts."""

import logging
from collections.abc import Callable, Hashable, Iterable

from phalanx.media.pictures import Picture
from phalanx.types import Prompt

logger = logging.getLogger(__name__)


def held_out_overlap(train: Iterable[Prompt], val: Iterable[Prompt], image: str | None = None) -> int:
    """Count the validation prompts that are training prompts as well, and warn if there are any.

    Prompts with images, or with one in the column `image`, count only if their images are the same as well. Raises
    ValueError for an image that cannot be read.
    """

    def images(row: Prompt) -> tuple[Picture, ...]:
        return row.images if image is None else (row.meta[image],)

    held_out = list(val)
    seen, same = _common_rows(list(train), held_out, lambda row: row.text.strip())
    # compare file sizes first, because reading all images takes long
    seen, same = _common_rows(seen, same, lambda row: (row.text.strip(), *[each.file_size for each in images(row)]))
    seen, same = _common_rows(seen, same, lambda row: (row.text.strip(), *[each.digest for each in images(row)]))
    overlap = len(same)
    if overlap:
        logger.warning(
            "%d of %d validation prompts are training prompts as well; they do not measure generalization",
            overlap,
            len(held_out),
        )
    return overlap


def _common_rows(
    some: list[Prompt], others: list[Prompt], name: Callable[[Prompt], Hashable]
) -> tuple[list[Prompt], list[Prompt]]:
    """The rows of each list whose name occurs in the other list as well."""
    both = set(map(name, some)) & set(map(name, others))
    return [row for row in some if name(row) in both], [row for row in others if name(row) in both]
