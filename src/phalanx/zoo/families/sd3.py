"""Stable Diffusion 3 and 3.5, with or without the T5 text encoder (arXiv 2403.03206)."""

from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from phalanx.models.flow.attention import JOINT_ATTENTION, DispatchedJointAttention
from phalanx.models.flow.embeds import pooled_embeds
from phalanx.models.flow.family import Embeds, FlowModel, check_size

CLIP_TOKENS = 77


class Model(FlowModel):
    """Stable Diffusion 3: latents [N, C, H/8, W/8]; guidance by `rollout.guidance_scale`."""

    pipeline_class = "StableDiffusion3Pipeline"
    transformer_class = SD3Transformer2DModel
    omni_pipeline = "phalanx.zoo.engines.omni.sd3:SD3Pipeline"
    lora_targets = JOINT_ATTENTION

    @staticmethod
    def adapt(transformer: Any) -> None:
        transformer.set_attn_processor(DispatchedJointAttention())

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            texts, texts, texts, device=device, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        return pooled_embeds(embeds, pooled)

    def schedule(self, num_inference_steps: int, height: int, width: int, frames: int = 1) -> tuple[Tensor, Tensor]:
        scheduler = self.pipeline.scheduler
        mu = None
        if scheduler.config.use_dynamic_shifting:
            mu = self.dynamic_shift(self.tokens(height, width), num_inference_steps)
        scheduler.set_timesteps(num_inference_steps, mu=mu)
        return scheduler.sigmas.float().cpu(), scheduler.timesteps.float().cpu()

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor, patch = self.pipeline.vae_scale_factor, self.transformer.config.patch_size
        unit, limit = factor * patch, self.transformer.config.pos_embed_max_size * factor * patch
        check_size(height, width, unit, limit)
        return (self.transformer.config.in_channels, height // factor, width // factor)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        return self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps,
            encoder_hidden_states=embeds["prompt_embeds"],
            pooled_projections=embeds["pooled"],
            return_dict=False,
        )[0]

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of T5, or of CLIP if the folder has no T5."""
        if self.pipeline.tokenizer_3 is None:
            return self.pipeline.tokenizer, self.pipeline.tokenizer(texts)["input_ids"], CLIP_TOKENS
        return self.pipeline.tokenizer_3, self.pipeline.tokenizer_3(texts)["input_ids"], max_length

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        """CLIP's tokens precede those of T5."""
        return CLIP_TOKENS + max_length
