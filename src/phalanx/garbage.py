"""Pause garbage collection while libraries are imported, which creates hardly any garbage.

Python would otherwise traverse all of their objects again and again, which takes a fifth of the import time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection within the block, or until `collect_again`."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_again() -> None:
    """Resume garbage collection within `uncollected`; it ignores the libraries' objects, which exist by then."""
    global _frozen
    if not gc.isenabled():
        if not _frozen:  # a process may build several jobs, and what is left of one is no library
            gc.freeze()
        _frozen = True
        gc.enable()
