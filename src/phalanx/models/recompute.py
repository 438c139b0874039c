"""Gradient checkpointing of a diffusers transformer's blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(blocks: Sequence[nn.Module]) -> Callable[..., Any]:
    """The gradient checkpointing function for a diffusers transformer that recomputes only `blocks`."""
    chosen = set(blocks)

    def run(block: nn.Module, *inputs: Any) -> Any:
        if block in chosen:
            return checkpoint(block.__call__, *inputs, use_reentrant=False)
        return block(*inputs)

    return run


def run_block(transformer: Any, block: nn.Module, *inputs: Any) -> Any:
    """Call a block as diffusers' transformers do: with gradients by their checkpointing function, if they have one."""
    if transformer.gradient_checkpointing and torch.is_grad_enabled():
        return transformer._gradient_checkpointing_func(block, *inputs)
    return block(*inputs)
