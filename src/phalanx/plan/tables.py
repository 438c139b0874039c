"""Tables of a plan, the unit of their sizes, and groups of ranks in words."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from phalanx.distributed.roles import span

GROUPS = 4  # groups, and ranks of a group, that are written out

T = TypeVar("T")
Rows = list[tuple[str, str]]  # a name and a text


class Scale:
    """Sizes as numbers of one unit, GB (10^9 bytes) or MB (10^6), the one that fits `largest`."""

    def __init__(self, largest: int) -> None:
        self.unit, self._bytes = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)

    @classmethod
    def of(cls, size: int) -> str:
        """One size with its unit."""
        scale = cls(size)
        return f"{scale.plain(size)} {scale.unit}"

    def __call__(self, size: int) -> str:
        """In a table, where a size that rounds to 0.00 is a dash."""
        return self.plain(size) if size >= self._bytes / 200 else "-"

    def plain(self, size: int) -> str:
        """In a sentence."""
        return f"{size / self._bytes:.2f}"


def listed(rows: Rows) -> Iterator[str]:
    """Lines of a name and a text, in two columns."""
    longest = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        yield f"  {name:<{longest}}  {text}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = map(str.rjust, rest, widths[1:])
        yield "  ".join([f"  {first:<{widths[0]}}", *cells]).rstrip()


def shortened(items: list[T], most: int, gap: T) -> list[T]:
    """At most so many items, with a gap in place of the last ones but one."""
    return items if len(items) <= most else [*items[: most - 1], gap, items[-1]]


def groups(ranks: Sequence[range]) -> str:
    """Groups of ranks, the middle ones left out where there are many."""
    return " | ".join(shortened(list(map(_span, ranks)), GROUPS, ".."))


def _span(ranks: range) -> str:
    if ranks.step == 1 or len(ranks) <= GROUPS:
        return span(ranks, " ")
    return f"{ranks[0]} {ranks[1]} .. {ranks[-1]}"
