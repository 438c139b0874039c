"""Reward: VBench's temporal flickering (arXiv 2311.17982), in 0..1; 1 if no pixel changes between frames."""

from typing import Any

from torch import Tensor

from phalanx.rewards.base import differentiable
from phalanx.zoo.rewards.video._frames import check_frames


@differentiable
def temporal_flickering(videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """Scores [B] of videos [B, F, 3, H, W] in 0..1: 1 minus the mean absolute difference of consecutive frames."""
    check_frames(videos)
    return 1 - (videos[:, 1:] - videos[:, :-1]).abs().mean(dim=(1, 2, 3, 4))
