"""Rows whose images cannot be used (data.unusable_rows), found before the first step."""

from collections import ChainMap
from collections.abc import Callable, Sequence

from phalanx.data.data_files import DataError
from phalanx.data.unusable import UnusableRows
from phalanx.distributed.collectives import all_gather_object
from phalanx.distributed.mesh import World
from phalanx.media.pictures import Picture
from phalanx.types import Prompt


def usable_images(
    rows: list[Prompt],
    key: str,
    *,
    unusable: str,
    world: World,
    check: Callable[[list[Prompt]], None] = lambda rows: None,
) -> list[Prompt]:
    """The rows whose images can be read; all ranks call this together.

    check: raises ValueError for a row with images that the model does not take. For the other arguments and what is
    raised see `usable_rows`.
    """
    kept = usable_rows(
        list(map(_row_images, rows)), key, unusable=unusable, world=world, check=lambda i: check([rows[i]])
    )
    return [rows[i] for i in kept]


def _row_images(row: Prompt) -> list[Picture]:
    """The images that a row's prompt shows, and those of its columns."""
    return [*row.images, *(value for value in row.meta.values() if isinstance(value, Picture))]


def usable_rows(
    images: Sequence[Sequence[Picture]],
    key: str,
    *,
    unusable: str,
    world: World,
    check: Callable[[int], None] = lambda row: None,
) -> list[int]:
    """The rows of which all images can be read; each rank looks at every n-th row, and all ranks call this together.

    images: those of each row. key: the configuration key of the rows' files. unusable: data.unusable_rows. check:
    raises ValueError if the images of this row are not the expected ones. Raises DataError, on all ranks alike, for a
    row with an image that is missing, of an unknown format or cut off if `unusable` is `error`, and if no row is left.
    """
    every = list(range(len(images)))
    shown = list(filter(images.__getitem__, every))
    if not shown:
        return every
    reasons: dict[int, str] = {}
    for i in shown[world.rank :: world.size]:
        try:
            check(i)
            for picture in images[i]:
                picture.check()
        except ValueError as error:
            reasons[i] = str(error)
    lost = dict(ChainMap(*all_gather_object(reasons)))
    drop = UnusableRows(key, unusable)
    others = f"; {len(lost)} of {len(images)} rows cannot be used" if len(lost) > 1 else ""
    for i in sorted(lost):
        hint = f"{others}; data.unusable_rows=filter leaves such rows out" if unusable == "error" else ""
        drop(DataError(f"{lost[i]}{hint}"))
    drop.report(len(images) - len(lost))
    return [i for i in every if i not in lost]
