"""Reward: VBench's background consistency (arXiv 2311.17982): how alike CLIP finds the frames of a video, 0..1."""

from typing import Any

import torch
from torch import Tensor

from phalanx.rewards.base import DeviceReward
from phalanx.rewards.image._clip import Clip
from phalanx.rewards.video._frames import check_frames, consistency


class BackgroundConsistency(DeviceReward):
    """`model`: folder or hub id of a CLIPModel with its processor."""

    def __init__(self, model: str = "openai/clip-vit-base-patch32", device: str = "cpu") -> None:
        self._clip = Clip(model, device, text=False, antialias=False)

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Videos [B, F, 3, H, W] in 0..1 -> [B]."""
        return self.with_gradient(videos, prompts, metadata)

    def with_gradient(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """See phalanx.rewards.HasGradient."""
        check_frames(videos)
        return torch.stack([consistency(self._clip.images(video)) for video in videos])
