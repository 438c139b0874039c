"""Garbage collection is paused while libraries are loaded, which make hardly any garbage.

Python would look through all of their objects again and again, a fifth of the time that loading takes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection within the block, or until `collect_again`."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_again() -> None:
    """Resume garbage collection within `uncollected`; it passes over objects that exist by now, the libraries'."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
