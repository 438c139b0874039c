"""Reward: VBench's temporal flickering (arXiv 2311.17982): how little pixels change from frame to frame, 0..1."""

from typing import Any

from torch import Tensor

from phalanx.rewards.base import differentiable
from phalanx.rewards.video._frames import check_frames


@differentiable
def temporal_flickering(videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
    """Videos [B, F, 3, H, W] in 0..1 -> [B]: 1 less the mean absolute difference of frames that follow each other."""
    check_frames(videos)
    return 1 - (videos[:, 1:] - videos[:, :-1]).abs().mean(dim=(1, 2, 3, 4))
