"""Stable Diffusion 3 and 3.5, with or without the T5 text encoder (arXiv 2403.03206)."""

import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from phalanx.config.flow import FlowModelConfig
from phalanx.models.flow.attention import DispatchedJointAttention
from phalanx.models.flow.family import Embeds, FlowModel, check_size, decode_kl, encode_kl

CLIP_TOKENS = 77


class Model(FlowModel):
    """SD3 family: latents [N, C, H/8, W/8]; guidance `rollout.guidance_scale`."""

    pipeline_class = "StableDiffusion3Pipeline"
    omni_pipeline = "phalanx.engines.omni.sd3:SD3Pipeline"
    guidance_key = "guidance_scale"
    default_negative = ""
    lora_targets = (
        "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
        "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
    )  # fmt: skip

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        self.load(config, dtype, weights_dtype, StableDiffusion3Pipeline, SD3Transformer2DModel)
        p = self.pipeline
        encoders = (p.text_encoder, p.text_encoder_2, p.text_encoder_3)  # T5 comes last, or not
        self.text_encoders = [e for e in encoders if e is not None]
        if config.attn_backend is not None:
            self.transformer.set_attn_processor(DispatchedJointAttention())

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            texts, texts, texts, device=device, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        pairs = zip(embeds.cpu(), pooled.cpu(), strict=True)
        return [{"prompt_embeds": e.clone(), "pooled": p.clone()} for e, p in pairs]

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        names = ("prompt_embeds", "pooled")
        return {name: torch.stack([e[name] for e in embeds]) for name in names}

    def schedule(self, num_inference_steps: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        scheduler = self.pipeline.scheduler
        mu = None
        if scheduler.config.use_dynamic_shifting:
            mu = self.dynamic_shift(self.tokens(height, width))
        scheduler.set_timesteps(num_inference_steps, mu=mu)
        return scheduler.sigmas.float().cpu(), scheduler.timesteps.float().cpu()

    def tokens(self, height: int, width: int) -> int:
        (_, h, w), patch = self.latent_shape(height, width), self.transformer.config.patch_size
        return (h // patch) * (w // patch)

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
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

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        return decode_kl(self.vae, latents)

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return encode_kl(self.vae, images, generator)

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        """CLIP's tokens come before those of T5."""
        return CLIP_TOKENS + max_length

    def embeds_like(self, length: int, height: int, width: int) -> Embeds:
        c = self.transformer.config
        shapes = {"prompt_embeds": (length, c.joint_attention_dim), "pooled": (c.pooled_projection_dim,)}
        return {name: torch.empty(shape, dtype=self.dtype) for name, shape in shapes.items()}
