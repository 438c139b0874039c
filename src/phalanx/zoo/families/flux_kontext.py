"""FLUX.1 Kontext (arXiv 2506.15742): as FLUX.1 dev, with an image to edit."""

import torch
from PIL import Image
from torch import Tensor

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.family import Embeds, Instruction
from phalanx.models.flow.references import References
from phalanx.zoo.families import flux


class Model(flux.Model):
    """As FLUX.1; `embeds["reference"]` [N, R, 64] has the packed latents of the image to edit.

    In every forward pass, they follow those of the sampled image, without noise.
    """

    pipeline_class = "FluxKontextPipeline"
    image_column = "image"

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        self.references = References(config.reference_size, self.pipeline.vae_scale_factor * 2)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        shape = super().latent_shape(height, width)
        self.references.size(height, width)
        return shape

    def encode_instruction(self, instruction: Instruction, device: torch.device, max_length: int) -> Embeds:
        """`prompt_embeds` and `pooled` of the text without the image, and `reference` [R, 64].

        All texts about an image share the tensor `reference`.
        """

        def encode_image(image: Image.Image, height: int, width: int) -> Tensor:
            pixels = self.pipeline.image_processor.preprocess(image, height, width)
            return self.pack(self.pipeline._encode_vae_image(pixels.to(device, self.dtype), None))[0].cpu()

        (embeds,) = self.encode([instruction.text], device, max_length)
        return embeds | {"reference": self.references.latents(instruction, encode_image)}

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        both = torch.cat([latents.to(self.dtype), embeds["reference"]], 1)
        return super().velocity(both, timesteps, embeds, height, width)[:, : latents.shape[1]]

    def positions(self, height: int, width: int) -> Tensor:
        reference = super().positions(*self.references.size(height, width))
        reference[:, 0] = 1  # index of the image
        return torch.cat([super().positions(height, width), reference])

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        count = self.tokens(height, width) + self.tokens(*self.references.size(height, width))
        return super().split_tokens(height, width, frames, max_length) | {f"an image of {height} x {width}": count}

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        embeds = super().embeds_like(length, height, width)
        tokens = self.tokens(*self.references.size(height, width))
        return embeds | {"reference": torch.empty(tokens, self.transformer.config.in_channels, dtype=self.dtype)}
