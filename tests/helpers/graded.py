"""Differentiable rewards of pictures, for tests of algorithms that use their gradient."""

from typing import Any

from torch import Tensor

from phalanx.rewards import differentiable


@differentiable
def brightness(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]], scale: float = 1.0) -> Tensor:
    """The mean of each picture [3, H, W]."""
    return scale * images.flatten(1).mean(1)


@differentiable
def numbers(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """As `brightness`, but without the gradient that it claims to have."""
    return images.detach().flatten(1).mean(1)
