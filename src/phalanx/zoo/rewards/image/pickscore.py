"""Reward: PickScore (arXiv 2305.01569), scaled as in flow_grpo: logit_scale x cosine / 26."""

from typing import Any

from torch import Tensor

from phalanx.rewards.base import DifferentiableReward
from phalanx.zoo.rewards.image._clip import Clip

_SCALE = 26.0  # about PickScore's largest logit for good images, so that scores are near 0..1


class Pickscore(DifferentiableReward):
    """`model`: folder or hub id of the CLIPModel; `processor`: folder or hub id of its tokenizer and preprocessing."""

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str = "cpu",
    ) -> None:
        self._clip = Clip(model, device, processor=processor)

    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B] of images [B, 3, H, W] in 0..1."""
        cosine = (self._clip.images(images) * self._clip.prompts(prompts)).sum(-1)
        return cosine * self._clip.logit_scale / _SCALE
