"""Shared parts of rewards of whole videos: the similarity of a video's frames."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.rewards.base import DeviceReward


class Consistency(DeviceReward):
    """Base class of rewards for the similarity of the `features` of a video's frames."""

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B] of videos [B, F, 3, H, W] in 0..1."""
        return self.with_gradient(videos, prompts, metadata)

    def with_gradient(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """See phalanx.rewards.HasGradient."""
        check_frames(videos)
        return torch.stack([consistency(self.features(video)) for video in videos])

    @abstractmethod
    def features(self, frames: Tensor) -> Tensor:
        """Features [F, D] of frames [F, 3, H, W] in 0..1."""


def check_frames(videos: Tensor) -> None:
    """Raise ValueError for videos [B, F, 3, H, W] of a single frame, which cannot be compared with another one."""
    if videos.shape[1] < 2:
        raise ValueError("samples of one frame; expected videos of two frames or more (rollout.num_frames)")


def consistency(features: Tensor) -> Tensor:
    """The consistency of a video, a scalar, from features [F, D] of its frames: the mean of the cosine similarities of
    each frame but the first to the previous and to the first frame, with negative ones counted as 0.
    """
    features = F.normalize(features, dim=-1)
    later = features[1:]
    to_previous = (later * features[:-1]).sum(-1).clamp(min=0)
    to_first = (later @ features[0]).clamp(min=0)
    return ((to_previous + to_first) / 2).mean()
