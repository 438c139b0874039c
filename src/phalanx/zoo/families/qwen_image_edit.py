"""Qwen-Image-Edit 2509 and 2511: edit an image, or several, by an instruction.

The text encoder reads the image with the instruction, and the transformer reads its latents: in every forward pass,
they follow those of the sampled image, without noise.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock
from PIL import Image
from torch import Tensor
from transformers import Qwen2VLProcessor

from phalanx.config.trained_model import FlowModelConfig
from phalanx.engines.loading import without_videos
from phalanx.models.flow.family import Embeds, Instruction
from phalanx.models.flow.references import to_ratio
from phalanx.zoo.families import qwen_image

TEMPLATE_TOKENS = 16  # limit of the template's tokens that are kept around image and instruction
PICTURE_TOKENS = 8  # limit of the template's tokens around each further image
ImageProcessor = without_videos(Qwen2VLProcessor)


class Model(qwen_image.Model):
    """As Qwen-Image; `embeds["reference"]` [N, R, 64] has the packed latents of the images to edit, concatenated.

    All rows of a batch have the same number of images, of the same size: each image is center-cropped to the aspect
    ratio of the output, and scaled as in the pipeline, to an area of `model.reference_size` squared for the VAE, and of
    384 squared for the text encoder.
    """

    pipeline_class = "QwenImageEditPlusPipeline"
    omni_pipeline = None
    image_column = "image"
    takes_several = True

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        self.area, self.count = config.reference_size**2, config.reference_count
        # by the image's digest and the output's size, as long as some embeddings refer to them
        self._references = WeakValueDictionary[tuple[str, tuple[int, int]], Tensor]()

    def components(self, path: str) -> dict[str, Any]:
        return {"processor": ImageProcessor.from_pretrained(path, subfolder="processor", trust_remote_code=False)}

    def reference_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of an image for the VAE, by the output's size; raises ValueError if a side would be 0."""
        found_width, found_height = stock.calculate_dimensions(self.area, width / height)
        if not found_width or not found_height:
            raise ValueError(f"model.reference_size: too small for images of {height} x {width} pixels")
        return found_height, found_width

    def seen_size(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) of an image for the text encoder."""
        found_width, found_height = stock.calculate_dimensions(stock.CONDITION_IMAGE_SIZE, width / height)
        return found_height, found_width

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        shape = super().latent_shape(height, width)
        self.reference_size(height, width)
        return shape

    def encode_instruction(self, instruction: Instruction, device: torch.device, max_length: int) -> Embeds:
        """`prompt_embeds` [L, D], and `reference` [R, 64], which all texts about an image share.

        Unlike in the stock pipeline, the instruction is truncated to `max_length` tokens.
        """
        instruction.picture.check_count(self.count)
        images, seen = [], []
        for part in instruction.picture.parts:
            images.append(to_ratio(part.pil(), *instruction.size))
            seen.append(self.pipeline.image_processor.resize(images[-1], *self.seen_size(*instruction.size)))
        text = cut_text(self.pipeline.tokenizer, instruction.text, max_length)
        embeds, _ = self.pipeline.encode_prompt([text], image=self.condition(seen), device=device)
        key = (instruction.picture.digest, instruction.size)
        reference = self._references.get(key)
        if reference is None:
            latents = [self.reference(image, instruction.size, device) for image in images]
            self._references[key] = reference = torch.cat(latents)
        return {"prompt_embeds": embeds[0].cpu(), "reference": reference}

    def reference(self, image: Image.Image, size: tuple[int, int], device: torch.device) -> Tensor:
        """The packed latents [R, 64] of an image, on the CPU; `size` is that of the output."""
        pixels = self.pipeline.image_processor.preprocess(image, *self.reference_size(*size))
        frame = pixels[:, :, None].to(device, self.dtype)
        return self.pack(self.pipeline._encode_vae_image(frame, None))[0].cpu()

    def condition(self, images: list[Image.Image]) -> Any:
        """The images in the form that the pipeline's encode_prompt takes."""
        return images

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of only the instruction, see `cut_text`."""
        return self.pipeline.tokenizer, self.pipeline.tokenizer(texts)["input_ids"], max_length

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        vision = self.pipeline.text_encoder.config.vision_config
        patch = vision.patch_size * vision.spatial_merge_size
        rows, columns = (round(side / patch) for side in self.seen_size(height, width))
        return max_length + self.count * (rows * columns + PICTURE_TOKENS) - PICTURE_TOKENS + TEMPLATE_TOKENS

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        batch = super().collate(embeds, length, padded)
        return batch | {"reference": torch.stack([e["reference"] for e in embeds])}

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        both = torch.cat([latents.to(self.dtype), embeds["reference"]], 1)
        return super().velocity(both, timesteps, embeds, height, width)[:, : latents.shape[1]]

    def image_shapes(self, height: int, width: int) -> list[tuple[int, int, int]]:
        reference = (1, *self.grid(*self.reference_size(height, width)))
        return [*super().image_shapes(height, width), *[reference] * self.count]

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        rows, columns = self.grid(*self.reference_size(height, width))
        reference = torch.empty(self.count * rows * columns, self.transformer.config.in_channels, dtype=self.dtype)
        return super().embeds_like(length, height, width) | {"reference": reference}


def cut_text(tokenizer: Any, text: str, max_length: int) -> str:
    """Truncate a text to its first `max_length` tokens."""
    tokens = tokenizer(text)["input_ids"]
    if len(tokens) <= max_length:
        return text
    return tokenizer.decode(tokens[:max_length]).rstrip("\ufffd")  # part of a character may be left
