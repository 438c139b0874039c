"""Wan 2.1 and Wan 2.2 TI2V-5B (arXiv 2503.20314), text to video: latents of a causal VAE."""

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor, nn

from phalanx.config.flow import FlowModelConfig
from phalanx.models.flow.embeds import padded_texts
from phalanx.models.flow.family import Embeds, FlowModel, check_size, to_pixels
from phalanx.models.flow.folder import model_index
from phalanx.models.flow.headers import component_names

MULTISTEP = "UniPCMultistepScheduler"  # the folders' own; its noise levels are taken, its solver is not
TRAINED_LENGTH = 512  # tokens of a text, padding included
# frames per second of the videos that Wan 2.1 and TI2V-5B were trained on
FPS, FPS_PER_TOKEN = 16, 24
# the model's own names of layers, by those of diffusers: in a block, and beside the blocks
NATIVE = {
    "attn1.to_q": "self_attn.q", "attn1.to_k": "self_attn.k", "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_q": "cross_attn.q", "attn2.to_k": "cross_attn.k", "attn2.to_v": "cross_attn.v",
    "attn2.to_out.0": "cross_attn.o", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1", "proj_out": "head.head",
}  # fmt: skip

log = logging.getLogger(__name__)


class Model(FlowModel):
    """Wan: latents [N, C, (F - 1) / 4 + 1, H/8, W/8] (TI2V-5B: H/16) of videos [N, F, 3, H, W], or
    with one frame of images [N, 3, H, W]; guidance `rollout.guidance_scale`.
    """

    pipeline_class = "WanPipeline"
    transformer_class = WanTransformer3DModel
    guidance_key = "guidance_scale"
    default_negative = ""
    makes_videos = True
    vae_dtype = torch.float32  # as the models' cards and Flow-GRPO have it
    # the layers of Flow-GRPO's Wan script: attention among the tokens, and to the text
    lora_targets = (
        "attn1.to_k", "attn1.to_out.0", "attn1.to_q", "attn1.to_v",
        "attn2.to_k", "attn2.to_out.0", "attn2.to_q", "attn2.to_v",
    )  # fmt: skip

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        if self.pipeline.transformer_2 is not None:
            raise _two(config.path)
        if self.transformer.config.image_dim is not None:
            raise ValueError(f"model.path: {config.path!r} wants an image to begin with; supported is text to video")
        c = self.pipeline.scheduler.config
        if type(self.pipeline.scheduler).__name__ == MULTISTEP and not c.use_flow_sigmas:
            raise ValueError(f"model.path: the scheduler of {config.path!r} should have use_flow_sigmas: true")
        if c.use_dynamic_shifting:
            raise ValueError(f"model.path: the scheduler of {config.path!r} should have use_dynamic_shifting: false")
        # TI2V-5B's pipeline gives each token a timestep; those of a text-to-video sample are all
        # equal, and one per sample is the same arithmetic without modulations of each token
        self.fps = FPS_PER_TOKEN if self.pipeline.config.expand_timesteps else FPS
        # its angles were rounded to weights_dtype, and are in no file
        rope = self.transformer.rope
        self.transformer.rope = WanRotaryPosEmbed(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)

    @classmethod
    def lora_names(cls, layers: Sequence[str]) -> dict[str, str]:
        """The model's own: ComfyUI reads no others, and diffusers reads them as well, where a block is among them."""
        names = super().lora_names(layers)
        if any(layer.startswith("blocks.") for layer in layers):
            for layer in layers:
                block = re.sub(r"(blocks\.\d+\.)?.*", r"\1", layer)
                names[layer] = f"diffusion_model.{block}{NATIVE[layer.removeprefix(block)]}"
        return names

    def components(self, path: str) -> dict[str, Any]:
        """None; a second transformer is told before anything is loaded."""
        if "transformer_2" in component_names(model_index(path)):
            raise _two(path)
        return {}

    def blocks(self) -> list[nn.Module]:
        return list(self.transformer.blocks)

    def check_length(self, max_length: int) -> None:
        if max_length != TRAINED_LENGTH:
            log.warning(
                "data.max_prompt_length: %d: Wan was trained with texts padded to %d tokens, and attends to the "
                "padding; set it to %d (for tasks/sample.py: max_prompt_length)",
                max_length,
                TRAINED_LENGTH,
                TRAINED_LENGTH,
            )

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Of texts as the pipeline cleans them."""
        return super().text_tokens([prompt_clean(text) for text in texts], max_length)

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """`prompt_embeds` [L, D] without their padding, which is zeros and comes back in `collate`:
        the model was trained with it, and attends to it; and `padded_length` [], that of
        `prompt_embeds` with it.
        """
        embeds, _ = self.pipeline.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=max_length, device=device
        )
        result = []
        for text in embeds.to(self.dtype).cpu():
            padding = int((~text.any(1)).flip(0).cumprod(0).sum())  # rows of zeros at the end
            kept = text[: max_length - padding].clone()
            result.append({"prompt_embeds": kept, "padded_length": torch.tensor(max_length)})
        return result

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        """`prompt_embeds` [N, max_length, D], whatever the longest of the step is."""
        return {"prompt_embeds": padded_texts(embeds, int(embeds[0]["padded_length"]))}

    def schedule(self, num_inference_steps: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        scheduler = self.pipeline.scheduler
        scheduler.set_timesteps(num_inference_steps)
        sigmas = scheduler.sigmas.float().cpu()
        sigmas[0] = 1.0  # the multistep solver stays 1e-6 below, for its logarithms
        return sigmas, scheduler.timesteps.float().cpu()

    def shift(self, num_inference_steps: int, height: int, width: int) -> float:
        c = self.pipeline.scheduler.config
        return float(c.flow_shift if type(self.pipeline.scheduler).__name__ == MULTISTEP else c.shift)

    def tokens(self, height: int, width: int) -> int:
        _, _, h, w = self.latent_shape(height, width)
        _, rows, columns = self.transformer.config.patch_size
        return (h // rows) * (w // columns)

    def context_plan(self) -> dict[str, Any]:
        # but for timesteps of each token, of which there are none here: see __init__
        return {layer: plan for layer, plan in super().context_plan().items() if layer != ""}

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        latents = self.sample_shape(height, width, frames)[1] // self.transformer.config.patch_size[0]
        return {f"a video of {frames} x {height} x {width}": latents * self.tokens(height, width)}

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self.sample_shape(height, width, 1)

    def sample_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        c = self.transformer.config
        factor, step = self.pipeline.vae_scale_factor_spatial, self.vae.config.scale_factor_temporal
        patches = c.patch_size
        unit = factor * patches[1]
        check_size(height, width, unit, c.rope_max_seq_len * unit)
        # the VAE is causal: the first frame is a latent of its own, and each `step` after it another
        if frames % step != 1 % step:
            below = max(frames - 1, 0) // step * step + 1
            raise ValueError(
                f"rollout.num_frames: {frames} should be 1 more than a multiple of {step}, e.g. {below} or "
                f"{below + step}"
            )
        most = (c.rope_max_seq_len * patches[0] - 1) * step + 1
        if frames > most:
            raise ValueError(f"rollout.num_frames: {frames} is more than the model's {most} frames")
        return (c.in_channels, (frames - 1) // step + 1, height // factor, width // factor)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        return self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps,
            encoder_hidden_states=embeds["prompt_embeds"],
            return_dict=False,
        )[0]

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        mean, std = self.latent_statistics(latents.device)
        pixels = to_pixels(self.vae.decode(latents * std + mean, return_dict=False)[0].transpose(1, 2))
        return pixels if latents.shape[2] > 1 else pixels[:, 0]

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.frame_latents(images, generator)

    def embeds_like(self, length: int, height: int, width: int) -> Embeds:
        text = torch.empty(length, self.transformer.config.text_dim, dtype=self.dtype)
        return {"prompt_embeds": text, "padded_length": torch.tensor(length, device="cpu")}  # `collate` reads it


def _two(path: str) -> ValueError:
    return ValueError(
        f"model.path: {path!r} has two transformers, of which each takes a part of the noise levels (Wan 2.2 A14B); "
        "supported are models of one, such as Wan 2.1 and Wan 2.2 TI2V-5B"
    )
