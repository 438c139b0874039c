"""Reference images of models that edit: one size for all of a batch, and one tensor for all texts about one."""

import math
from collections.abc import Callable
from weakref import WeakValueDictionary

from PIL import Image
from torch import Tensor

from phalanx.models.flow.family import Instruction


class References:
    """Latents of reference images. Each image is cut in the middle to the ratio of the images to be made, and is to be
    scaled to an area of `side` squared, with sides that are multiples of `unit` pixels.
    """

    def __init__(self, side: int, unit: int) -> None:
        self.side, self.unit = side, unit
        # by the image's digest and size, for as long as some embeddings have them
        self._latents = WeakValueDictionary[tuple[str, tuple[int, int]], Tensor]()

    def size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of a reference, by the size to be made; ValueError for none."""
        ratio = math.sqrt(height / width)
        rows, columns = round(self.side * ratio / self.unit), round(self.side / ratio / self.unit)
        if not rows or not columns:
            raise ValueError(f"model.reference_size: too small for images of {height} x {width} pixels")
        return rows * self.unit, columns * self.unit

    def latents(self, instruction: Instruction, encode: Callable[[Image.Image, int, int], Tensor]) -> Tensor:
        """The latents of an instruction's image, which `encode(image, height, width)` makes of the cut image, scaled to
        this size.

        Raises ValueError for an image that cannot be read.
        """
        key = (instruction.picture.digest, instruction.size)
        known = self._latents.get(key)
        if known is None:
            image = to_ratio(instruction.picture.pil(), *instruction.size)
            self._latents[key] = known = encode(image, *self.size(*instruction.size))
        return known


def to_ratio(image: Image.Image, height: int, width: int) -> Image.Image:
    """The largest part of an image, from its middle, whose sides are as `height` to `width`."""
    scale = min(image.height / height, image.width / width)
    cut_height, cut_width = max(round(height * scale), 1), max(round(width * scale), 1)
    left, top = (image.width - cut_width) // 2, (image.height - cut_height) // 2
    return image.crop((left, top, left + cut_width, top + cut_height))
