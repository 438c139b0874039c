"""The common parts of rewards for whole videos: the likeness of the frames of one."""

import torch.nn.functional as F
from torch import Tensor


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
