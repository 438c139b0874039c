"""Tables of a plan, the unit of their sizes, and groups of ranks in words."""

from collections.abc import Iterable, Iterator, Sequence

from phalanx.config.messages import aligned
from phalanx.run.roles import span

GROUPS = 4  # groups of ranks that are written out

Rows = list[tuple[str, str]]  # a name and a text


class Scale:
    """Sizes in one unit, GB (10^9 bytes) or MB (10^6), whichever suits `largest`."""

    def __init__(self, largest: int) -> None:
        self.unit, self._bytes = ("GB", 1e9) if largest >= 1e9 else ("MB", 1e6)

    @classmethod
    def of(cls, size: int) -> str:
        """A size with its unit."""
        scale = cls(size)
        return f"{scale.plain(size)} {scale.unit}"

    def __call__(self, size: int) -> str:
        """The cell of a table; a size that rounds to 0.00 is a dash."""
        return self.plain(size) if size >= self._bytes / 200 else "-"

    def plain(self, size: int) -> str:
        """A number within a sentence."""
        return f"{size / self._bytes:.2f}"


def listed(rows: Sequence[Sequence[str]], texts: int = 2) -> Iterator[str]:
    """Lines of a name and a text, or with texts=1 of a name and numbers, in columns."""
    for line in aligned(rows, texts):
        yield f"  {line}"


def groups(ranks: Iterable[Sequence[int]]) -> str:
    """Groups of ranks; of many groups only the first ones and the last one."""
    texts = list(map(span, ranks))
    if len(texts) > GROUPS:
        texts = [*texts[: GROUPS - 1], "..", texts[-1]]
    return " | ".join(texts)
