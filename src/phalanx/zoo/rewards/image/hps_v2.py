"""Reward: HPS v2 and v2.1 (arXiv 2306.09341), a CLIP ViT-H/14 trained on human choices between images.

The score is the cosine similarity of image and prompt, without CLIP's logit scale: about 0.2 to 0.35; the benchmark's
tables show 100 times this. As in github.com/tgxs002/HPSv2, an image that is not square is padded with black, whereas
other rewards with a CLIP crop it. Unlike there, the cosine is computed in float32 rather than in half precision.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.rewards.base import DifferentiableReward
from phalanx.zoo.rewards.image._clip import Clip, resize


class HpsV2(DifferentiableReward):
    """`model`: folder or hub id of the CLIPModel; `processor`: that of its tokenizer and preprocessing, by default
    `model`.

    The published weights are for open_clip; `python -m phalanx.tools.convert_open_clip` converts them to a folder.
    """

    def __init__(self, model: str, processor: str | None = None, device: str = "cpu") -> None:
        self._clip = Clip(model, device, processor=processor)
        self._device = torch.device(device)

    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B] in -1..1 of images [B, 3, H, W] in 0..1."""
        square = letterbox(images.to(self._device), self._clip.edge)
        return (self._clip.images(square) * self._clip.prompts(prompts)).sum(-1)


def letterbox(images: Tensor, edge: int) -> Tensor:
    """Resize images [B, 3, H, W] in 0..1 so that the longer side has `edge` pixels, and pad them with black to
    [B, 3, edge, edge]. CLIP's preprocessing then only normalises the result, which already has its size.
    """
    scale = edge / max(images.shape[2:])
    height, width = (max(1, round(side * scale)) for side in images.shape[2:])
    left, top = (edge - width) // 2, (edge - height) // 2
    sides = (left, edge - width - left, top, edge - height - top)
    return F.pad(resize(images, (height, width)) / 255, sides)
