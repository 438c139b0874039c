"""When Python looks for garbage: not while libraries are loaded, which make hardly any.

It would look through all of their objects again and again, a fifth of the time that loading takes.
"""

import gc


def pause_collection() -> None:
    """Leave garbage alone until `resume_collection`."""
    gc.disable()


def resume_collection() -> None:
    """Collect garbage again after a pause, among the objects from now on: those that are there are the libraries'."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
