"""A differentiable reward for learn_gradient.py: the share of red in an image's light."""

from typing import Any

from torch import Tensor

from phalanx.rewards import differentiable


@differentiable
def redness(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """The share [B] of red in the mean light of images [B, 3, H, W]."""
    light = images.mean(dim=(2, 3))
    return light[:, 0] / (light.sum(1) + 1e-6)
