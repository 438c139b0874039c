"""Which tensors of a file a library's conversion uses.

diffusers converts the LoRAs of many trainers, and its functions drop what they do not know, at most with a line in its
log.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_AS_NUMBER = (Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__)


class Traced(Tensor):
    """A tensor that knows from which tensors of a file it was computed, by their names.

    read: names of the file's tensors that were read as numbers; shared by all tensors of the file.
    """

    sources: frozenset[str]
    read: set[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; its results have the sources of all its arguments."""
        result = super().__torch_function__(func, types, args, kwargs or {})
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Traced)]
        sources = frozenset[str]().union(*(value.sources for value in given))
        if func in _AS_NUMBER:
            given[0].read.update(sources)
        for value in tree_leaves(result):
            if isinstance(value, Traced):
                value.sources, value.read = sources, given[0].read
        return result


def convert_traced(
    tensors: Mapping[str, Tensor], convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
) -> tuple[dict[str, Tensor], list[str]]:
    """Convert a file's tensors; returns the result, and the names of those that it does not depend on.

    Tensors of zeros, which change nothing when they are added to weights, are not among these.
    """
    given: dict[str, Tensor] = {}
    read: set[str] = set()
    for name, tensor in tensors.items():
        value = tensor.as_subclass(Traced)
        value.sources, value.read = frozenset([name]), read
        given[name] = value
    result = dict(convert(given))
    used = read | {name for tensor in result.values() if isinstance(tensor, Traced) for name in tensor.sources}
    unused = [name for name, tensor in tensors.items() if name not in used and bool(torch.any(tensor != 0))]
    return {name: tensor.as_subclass(Tensor) for name, tensor in result.items()}, sorted(unused)
