"""CUDA graphs: operators are kept as they run, and a replay runs them again over the same memory, without the program.

Numbers of Python are constants of a graph, and tensors are what lies in their memory at the replay. A wait for the
device and a copy from the host within a graph are faults, as is the use of a side stream's work without waiting for it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.pretended.places import memory_of
from tests.pretended.record import RECORD
from tests.pretended.streams import Stream, within


class CUDAGraph:
    """As torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.tape: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        RECORD.operators += 1
        with _disable_current_modes():
            for func, args, kwargs, made in self.tape:
                again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
                for held, new in zip(made, again, strict=True):
                    if held.untyped_storage()._cdata != new.untyped_storage()._cdata:
                        held.copy_(new)
        for *_, made in self.tape:
            for held in made:
                memory = memory_of(held)
                if memory is not None:
                    memory.write()


@contextlib.contextmanager
def graph(made: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    """As torch.cuda.graph."""
    with within(stream):
        RECORD.tape = made.tape
        try:
            yield
        finally:
            RECORD.tape = None


def note(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Keep an operator, if a graph is being made; a view needs nothing at a replay."""
    if RECORD.tape is not None and not func.is_view:
        RECORD.tape.append((func, args, kwargs, [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]))
