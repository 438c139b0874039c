"""Tables of a plan, and the unit of their sizes."""

from collections.abc import Iterator, Sequence

from phalanx.plan.pace import Rows


class Scale:
    """Sizes as numbers of one unit, GB (10^9 bytes) or MB (10^6), the one that fits `largest`."""

    def __init__(self, largest: int) -> None:
        self.unit, self._bytes = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)

    def __call__(self, size: int) -> str:
        """In a table, where what rounds to nothing is a dash."""
        return self.plain(size) if size >= self._bytes / 200 else "-"

    def plain(self, size: int) -> str:
        """In a sentence."""
        return f"{size / self._bytes:.2f}"


def listed(rows: Rows) -> Iterator[str]:
    """Names and what is to be said of them."""
    longest = max(len(name) for name, _ in rows)
    return (f"  {name:<{longest}}  {text}" for name, text in rows)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([f"  {first:<{widths[0]}}", *cells]).rstrip()
