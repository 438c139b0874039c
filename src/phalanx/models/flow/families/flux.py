"""FLUX.1 dev and schnell: packed latents, dynamic shift, guidance distilled into the model.

dev takes the guidance scale as an input of the forward pass (arXiv 2210.03142), so that no second
branch is computed; schnell takes none. Classifier-free guidance with a negative prompt is there
beside it, as in diffusers' pipeline.
"""

import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from phalanx.config.flow import FlowModelConfig
from phalanx.models.flow.family import Embeds, PackedModel, decode_kl, encode_kl


class Model(PackedModel):
    """FLUX.1: latents [N, (H/16)(W/16), 64], a token for each 2 x 2 patch; `rollout.guidance_scale`
    is an input of dev, `rollout.true_cfg_scale` is classifier-free guidance.
    """

    pipeline_class = "FluxPipeline"
    guidance_key = "true_cfg_scale"
    embedded_guidance_key: str | None = "guidance_scale"
    default_negative = ""
    # the layers of Flow-GRPO's FLUX script: attention and both streams' MLPs, and in single blocks
    # the attention
    lora_targets = (
        "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out",
        "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    )  # fmt: skip

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        self.load(config, dtype, weights_dtype, FluxPipeline, FluxTransformer2DModel)
        self.text_encoders = [self.pipeline.text_encoder, self.pipeline.text_encoder_2]
        if not self.transformer.config.guidance_embeds:  # schnell
            self.embedded_guidance_key = None

    def blocks(self) -> list[nn.Module]:
        """Blocks of two streams, then those of one."""
        return [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        # T5's padding stays: the model was trained with it, and attends to it
        embeds, pooled, _ = self.pipeline.encode_prompt(texts, device=device, max_sequence_length=max_length)
        pairs = zip(embeds.cpu(), pooled.cpu(), strict=True)
        return [{"prompt_embeds": e.clone(), "pooled": p.clone()} for e, p in pairs]

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        names = ("prompt_embeds", "pooled")
        return {name: torch.stack([e[name] for e in embeds]) for name in names}

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        return self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps.to(self.dtype) / 1000,  # in this order, as the pipeline rounds it
            guidance=embeds["guidance"] if self.embedded_guidance_key is not None else None,
            pooled_projections=embeds["pooled"],
            encoder_hidden_states=embeds["prompt_embeds"],
            return_dict=False,
            **self._positions(height, width, embeds["prompt_embeds"].shape[1], latents.device),
        )[0]

    def _positions(self, height: int, width: int, text_length: int, device: torch.device) -> dict[str, Tensor]:
        """Positions [L, 3] float32 of tokens: texts are at 0, image tokens at (0, row, column)."""
        rows, columns = self.grid(height, width)
        grid = torch.zeros(rows, columns, 3, device=device)
        grid[..., 1] = torch.arange(rows, device=device)[:, None]
        grid[..., 2] = torch.arange(columns, device=device)
        return {"txt_ids": torch.zeros(text_length, 3, device=device), "img_ids": grid.flatten(0, 1)}

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        unpacked = self.pipeline._unpack_latents(latents, height, width, self.pipeline.vae_scale_factor)
        return decode_kl(self.vae, unpacked)

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        latents = encode_kl(self.vae, images, generator)
        return self.pipeline._pack_latents(latents, *latents.shape)

    def embeds_like(self, length: int, height: int, width: int) -> Embeds:
        c = self.transformer.config
        shapes = {"prompt_embeds": (length, c.joint_attention_dim), "pooled": (c.pooled_projection_dim,)}
        return {name: torch.empty(shape, dtype=self.dtype) for name, shape in shapes.items()}
