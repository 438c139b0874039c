"""Qwen-Image (arXiv 2508.02324): packed latents, dynamic shift, true classifier-free guidance."""

import math
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor

from phalanx.models.flow.attention import JOINT_ATTENTION, use_real_rotations
from phalanx.models.flow.embeds import masked_texts
from phalanx.models.flow.family import Embeds, PackedModel


class Model(PackedModel):
    """Qwen-Image: latents [N, (H/16)(W/16), 64], a token per 2 x 2 patch."""

    pipeline_class = "QwenImagePipeline"
    transformer_class = QwenImageTransformer2DModel
    omni_pipeline: str | None = "phalanx.zoo.engines.omni.qwen_image:QwenImagePipeline"
    guidance_key = "true_cfg_scale"
    default_negative = " "
    masks_text = True
    # the layers of VeRL-Omni's recipes: all but the modulation
    lora_targets = (*JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")

    def prepare_compiling(self) -> None:
        super().prepare_compiling()
        use_real_rotations(self.transformer)

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of the text and of the template after it; tokens of the template before it are dropped."""
        p = self.pipeline
        tokens = p.tokenizer([p.prompt_template_encode.format(text) for text in texts])["input_ids"]
        read = [ids[p.prompt_template_encode_start_idx :] for ids in tokens]
        return p.tokenizer, read, min(max_length, p.tokenizer_max_length)

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        # the pipeline puts the prompt into its template and drops the template's first 34 tokens
        embeds, mask = self.pipeline.encode_prompt(texts, device=device, max_sequence_length=max_length)
        lengths = [embeds.shape[1]] * len(texts) if mask is None else mask.sum(1).tolist()
        # cloned: a view would keep the whole batch in memory
        pairs = zip(embeds.cpu(), lengths, strict=True)
        return [{"prompt_embeds": e[:n].clone()} for e, n in pairs]

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        return masked_texts(embeds, length, padded, "prompt_embeds_mask")

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        return self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps.to(self.dtype) / 1000,  # in this order, for the same rounding as in the pipeline
            encoder_hidden_states=embeds["prompt_embeds"],
            # None if all prompts have the same length, because attention is faster without a mask
            encoder_hidden_states_mask=embeds.get("prompt_embeds_mask"),
            img_shapes=[self.image_shapes(height, width)] * len(latents),
            return_dict=False,
        )[0]

    def image_shapes(self, height: int, width: int) -> list[tuple[int, int, int]]:
        """Frames, rows and columns of each image in the sequence of image tokens."""
        return [(1, *self.grid(height, width))]

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        count = sum(math.prod(shape) for shape in self.image_shapes(height, width))
        return {f"an image of {height} x {width}": count}

    def guide(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """True classifier-free guidance: each token [C] is rescaled to its norm in `positive`."""
        combined = super().guide(negative, positive, scale)
        norm = positive.norm(dim=-1, keepdim=True)
        return combined * (norm / combined.norm(dim=-1, keepdim=True))

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        mean, std = self.latent_statistics(latents.device)
        # a video VAE, for which the image is a single frame
        return self.decode_frames(self.unpack(latents, height, width) * std + mean)

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.pack(self.frame_latents(images, generator))

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        return {"prompt_embeds": torch.empty(length, self.transformer.config.joint_attention_dim, dtype=self.dtype)}
