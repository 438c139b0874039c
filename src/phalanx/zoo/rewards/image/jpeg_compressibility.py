"""Reward: the negative size of the image as a JPEG (DDPO, arXiv 2305.13301).

flow_grpo also divides it by 500: weight 0.002 gives its scale.
"""

from typing import Any

from torch import Tensor

from phalanx.zoo.rewards.image.jpeg_incompressibility import jpeg_incompressibility


def jpeg_compressibility(
    images: Tensor, prompts: list[str], metadata: list[dict[str, Any]], quality: int = 95
) -> list[float]:
    """The negative size of each image [3, H, W] as a JPEG, in kilobytes (1000 bytes)."""
    return [-size for size in jpeg_incompressibility(images, prompts, metadata, quality)]
