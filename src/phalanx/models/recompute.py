"""Gradient checkpointing of a diffusers transformer's blocks."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.models.meeting import adapters, adapters_now


def recompute(blocks: Sequence[nn.Module]) -> Callable[..., Any]:
    """The gradient checkpointing function for a diffusers transformer that recomputes only `blocks`."""
    for block in blocks:
        block.recomputed = True  # type: ignore[assignment]  # copies of the module have it, too

    def run(block: nn.Module, *inputs: Any) -> Any:
        if "recomputed" in vars(block):
            again = partial(adapters, adapters_now())
            return checkpoint(block.__call__, *inputs, use_reentrant=False, context_fn=lambda: (nullcontext(), again()))
        return block(*inputs)

    return run


def run_block(transformer: Any, block: nn.Module, *inputs: Any) -> Any:
    """Call a block as diffusers' transformers do: with gradients by their checkpointing function, if they have one."""
    if transformer.gradient_checkpointing and torch.is_grad_enabled():
        return transformer._gradient_checkpointing_func(block, *inputs)
    return block(*inputs)
