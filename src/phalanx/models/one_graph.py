"""`model.compile`: each kind of block compiled once, for passes with and without a gradient alike.

torch compiles a block anew for passes without a gradient, with other fusions, which may round differently:
log-probabilities of rollout and replay would not be the same. Here a rollout runs what training runs forward, and what
that keeps for a backward pass goes with the end of its block.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes
from torch.utils._pytree import tree_map_only


class OneGraph:
    """Compiled blocks; a call of a function that runs them uses the same graphs in both modes."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._cutting = False
        # Two sizes that happen to be equal when a graph is made would be one to it: later a graph for sizes that differ
        # would be made beside it, and which of two that fit is taken depends on what ran before.
        shapes.use_duck_shape = False
        # of one class: first and other blocks, a mask or none, the LoRA on or off, a single row
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)
        for block in blocks:
            # Only the forward: FSDP's hooks, which gather its weights, stay outside. Blocks that are alike share one
            # compilation, and so do all lengths of texts.
            block.forward = self._cut(torch.compile(block.forward, fullgraph=True, dynamic=True))

    def _cut(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The outputs of a block without its graph, where no backward pass will come."""

        @wraps(forward)
        def cut(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if not self._cutting:
                return out
            return tree_map_only(Tensor, _leaf, out)

        return cut

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function` of `args`, whose tensors need no gradient where gradients are off."""
        if torch.is_grad_enabled():
            return function(*args)
        self._cutting = True
        try:
            with torch.enable_grad():
                out = function(*args)
        finally:
            self._cutting = False
        return tree_map_only(Tensor, Tensor.detach, out)


def _leaf(tensor: Tensor) -> Tensor:
    """A tensor without a history: it looks to the next block as it would in training."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
