"""When Python looks for garbage: not while libraries are loaded, which make hardly any.

It would look through all of their objects again and again, a fifth of the time that loading takes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave garbage alone within, or until `collect_again`."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_again() -> None:
    """Collect garbage again, within `uncollected`; what is there by now, the libraries' objects, is passed over."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
