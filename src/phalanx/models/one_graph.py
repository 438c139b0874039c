"""`model.compile`: each kind of block is compiled once, for passes with and without gradients.

torch compiles a separate graph for passes without gradients, with other fusions that may round differently, so that the
log-probabilities of rollout and replay would differ. Here a rollout runs the forward graph of training, and frees what
it saves for a backward pass at the end of each block.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes
from torch.utils._pytree import tree_map_only


def any_shape() -> None:
    """Settings of torch.compile for graphs that serve all shapes."""
    # Duck shaping assumes that two sizes that are equal at compile time are always equal. When they differ later, a
    # second graph is compiled that also fits the first case, and which of the two runs depends on their order.
    shapes.use_duck_shape = False
    # graphs of one class: the first block and others, with and without a mask, LoRA on and off, a single row
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)


class OneGraph:
    """Compiled blocks; a call of a function that runs them uses the same graphs in both modes."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._cutting = False
        any_shape()
        for block in blocks:
            # Only the forward: FSDP's hooks, which gather its weights, stay outside the graph. Equal blocks share one
            # compilation, for all lengths of texts.
            block.forward = self._cut_graph(torch.compile(block.forward, fullgraph=True, dynamic=True))

    def _cut_graph(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a block's forward to detach its outputs from its autograd graph if no backward pass follows."""

        @wraps(forward)
        def cut(*args: Any, **kwargs: Any) -> Any:
            out = forward(*args, **kwargs)
            if not self._cutting:
                return out
            return tree_map_only(Tensor, _leaf_copy, out)

        return cut

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`; without gradients, the tensors it returns are detached."""
        if torch.is_grad_enabled():
            return function(*args)
        self._cutting = True
        try:
            with torch.enable_grad():
                out = function(*args)
        finally:
            self._cutting = False
        return tree_map_only(Tensor, Tensor.detach, out)


def _leaf_copy(tensor: Tensor) -> Tensor:
    """A copy without history that requires a gradient as in training, so that the next block has the same graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
