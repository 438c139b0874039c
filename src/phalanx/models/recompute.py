"""Gradient checkpointing of some of a diffusers transformer's blocks."""

from collections.abc import Callable, Sequence
from typing import Any

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
