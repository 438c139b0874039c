"""Reward: the size of the image as a JPEG (DDPO, arXiv 2305.13301)."""

from io import BytesIO
from typing import Any

from PIL import Image
from torch import Tensor

from phalanx.media.pictures import to_uint8


def jpeg_incompressibility(
    images: Tensor, prompts: list[str], metadata: list[dict[str, Any]], quality: int = 95
) -> list[float]:
    """The size of each image [3, H, W] as a JPEG, in kilobytes (1000 bytes)."""
    sizes = []
    for pixels in to_uint8(images).permute(0, 2, 3, 1).numpy():
        buffer = BytesIO()
        Image.fromarray(pixels).save(buffer, format="JPEG", quality=quality)
        sizes.append(buffer.tell() / 1000)
    return sizes
