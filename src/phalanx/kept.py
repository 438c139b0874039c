"""Frozen parts without process groups, which a process keeps while it builds its job again after a loss of ranks.

Nothing is kept until `keep` is called, so that a process that builds several jobs frees the parts of each one.
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
_parts: dict[Hashable, Any] = {}
_keeps = False


def keep() -> None:
    """From now on, `kept` remembers."""
    global _keeps
    _keeps = True


def kept(key: Hashable, make: Callable[[], T]) -> T:
    """The part that `make` builds, or the one that it built for an equal key. key: all that the part is made from."""
    if not _keeps:
        return make()
    if key not in _parts:
        _parts[key] = make()
    result: T = _parts[key]
    return result
