"""The common parts of rewards for whole videos: the likeness of the frames of one."""

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.rewards.base import DeviceReward


class Consistency(DeviceReward):
    """Base class of rewards by how alike the `features` of the frames of a video are."""

    @torch.no_grad()
    def __call__(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Videos [B, F, 3, H, W] in 0..1 -> [B]."""
        return self.with_gradient(videos, prompts, metadata)

    def with_gradient(self, videos: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """See phalanx.rewards.HasGradient."""
        check_frames(videos)
        return torch.stack([consistency(self.features(video)) for video in videos])

    @abstractmethod
    def features(self, frames: Tensor) -> Tensor:
        """Frames [F, 3, H, W] in 0..1 -> [F, D]."""


def check_frames(videos: Tensor) -> None:
    """ValueError for videos [B, F, 3, H, W] whose frames have nothing to be compared with."""
    if videos.shape[1] < 2:
        raise ValueError("samples of one frame; expected videos of two frames or more (rollout.num_frames)")


def consistency(features: Tensor) -> Tensor:
    """Features [F, D] of the frames of a video -> the mean over all frames but the first of the cosines to the frame
    before and to the first one, of which negative ones count as 0; a scalar.
    """
    features = F.normalize(features, dim=-1)
    later = features[1:]
    to_previous = (later * features[:-1]).sum(-1).clamp(min=0)
    to_first = (later @ features[0]).clamp(min=0)
    return ((to_previous + to_first) / 2).mean()
