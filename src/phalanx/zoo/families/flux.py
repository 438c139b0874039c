"""FLUX.1 dev and schnell: packed latents, dynamic shift, guidance distilled into the model.

dev takes the guidance scale as an input of the forward pass (arXiv 2210.03142), so that no second branch is computed;
schnell takes none. Classifier-free guidance with a negative prompt can be added, as in diffusers' pipeline.
"""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from phalanx.models.flow.attention import JOINT_ATTENTION
from phalanx.models.flow.embeds import pooled_embeds
from phalanx.models.flow.family import Embeds, PackedModel


class Model(PackedModel):
    """FLUX.1: latents [N, (H/16)(W/16), 64], a token per 2 x 2 patch.

    `rollout.guidance_scale` is an input of dev, `rollout.true_cfg_scale` is classifier-free guidance.
    """

    pipeline_class = "FluxPipeline"
    transformer_class = FluxTransformer2DModel
    guidance_key = "true_cfg_scale"
    embedded_guidance_key: str | None = "guidance_scale"
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    # the layers of Flow-GRPO's FLUX script: attention and the MLPs of both streams; in single-stream blocks, attention
    lora_targets = (*JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        return super().split_tokens(height, width, frames, max_length) | {"data.max_prompt_length": max_length}

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of T5."""
        return self.pipeline.tokenizer_2, self.pipeline.tokenizer_2(texts)["input_ids"], max_length

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        # T5's padding stays: the model was trained with it, and attends to it
        embeds, pooled, _ = self.pipeline.encode_prompt(texts, device=device, max_sequence_length=max_length)
        return pooled_embeds(embeds, pooled)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        with latents.device:  # created there, because a copy from the host would wait for the device
            image_ids = self.positions(height, width)
            text_ids = torch.zeros(embeds["prompt_embeds"].shape[1], 3)
        return self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps.to(self.dtype) / 1000,  # in this order, for the same rounding as in the pipeline
            guidance=embeds["guidance"] if self.embedded_guidance_key is not None else None,
            pooled_projections=embeds["pooled"],
            encoder_hidden_states=embeds["prompt_embeds"],
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]

    def positions(self, height: int, width: int) -> Tensor:
        """Positions [L, 3] of the image tokens, (0, row, column), on the current device."""
        return self.pipeline._prepare_latent_image_ids(1, *self.grid(height, width), None, torch.float32)

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        return super().decode(self.unpack(latents, height, width), height, width)

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.pack(super().encode_images(images, generator))
