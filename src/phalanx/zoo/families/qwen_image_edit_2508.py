"""The first Qwen-Image-Edit, of August 2025: as its successors, except for the image that the text encoder reads."""

from typing import Any

from PIL import Image

from phalanx.zoo.families import qwen_image_edit


class Model(qwen_image_edit.Model):
    """As qwen_image_edit; the text encoder reads the image at the same size as the VAE."""

    pipeline_class = "QwenImageEditPipeline"
    takes_several = False

    def seen_size(self, height: int, width: int) -> tuple[int, int]:
        return self.reference_size(height, width)

    def condition(self, images: list[Image.Image]) -> Any:
        (image,) = images
        return image
