"""Reward: CLIP's cosine similarity of image and prompt (arXiv 2104.08718, without its factor 2.5 and its clipping).

flow_grpo's clipscore is 100 / 30 of it: weight 3.333 gives its scale.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.rewards.base import DeviceReward
from phalanx.rewards.image._clip import Clip


class ClipScore(DeviceReward):
    """`model`: folder or hub id of a CLIPModel with its processor."""

    def __init__(self, model: str = "openai/clip-vit-large-patch14", device: str = "cpu") -> None:
        self._clip = Clip(model, device)

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Images [B, 3, H, W] in 0..1 -> [B] in -1..1."""
        return self.with_gradient(images, prompts, metadata)

    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """See phalanx.rewards.HasGradient."""
        return (self._clip.images(images) * self._clip.prompts(prompts)).sum(-1)
