"""Reference images of editing models: of one size within a batch, and encoded once for all texts about an image."""

import math
from collections.abc import Callable
from weakref import WeakValueDictionary

from PIL import Image
from torch import Tensor

from phalanx.models.flow.family import Instruction


class References:
    """Latents of reference images.

    Each image is center-cropped to the aspect ratio of the output, and scaled to an area of about `side` squared, with
    sides that are multiples of `unit` pixels.
    """

    def __init__(self, side: int, unit: int) -> None:
        self.side, self.unit = side, unit
        # by the image's digest and the output's size, as long as some embeddings refer to them
        self._latents = WeakValueDictionary[tuple[str, tuple[int, int]], Tensor]()

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of a reference, by the size of the output; raises ValueError if a side would be 0."""
        ratio = math.sqrt(height / width)
        rows, columns = round(self.side * ratio / self.unit), round(self.side / ratio / self.unit)
        if not rows or not columns:
            raise ValueError(f"model.reference_size: too small for images of {height} x {width} pixels")
        return rows * self.unit, columns * self.unit

    def latents(self, instruction: Instruction, encode: Callable[[Image.Image, int, int], Tensor]) -> Tensor:
        """The latents of an instruction's image; raises ValueError for an image that cannot be read.

        encode: called as encode(image, height, width) with the cropped image and the size to scale it to.
        """
        key = (instruction.picture.digest, instruction.size)
        latents = self._latents.get(key)
        if latents is None:
            image = to_ratio(instruction.picture.pil(), *instruction.size)
            self._latents[key] = latents = encode(image, *self.size(*instruction.size))
        return latents


def to_ratio(image: Image.Image, height: int, width: int) -> Image.Image:
    """Center-crop an image to the aspect ratio of `height` and `width`."""
    scale = min(image.height / height, image.width / width)
    cut_height, cut_width = max(round(height * scale), 1), max(round(width * scale), 1)
    left, top = (image.width - cut_width) // 2, (image.height - cut_height) // 2
    return image.crop((left, top, left + cut_width, top + cut_height))
