"""HunyuanVideo 1.5 (arXiv 2511.18870), text to video: two streams of tokens, and two text encoders."""

from typing import Any, ClassVar

import torch
from diffusers import HunyuanVideo15Transformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input
from torch import Tensor
from torch.nn.functional import pad

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.attention import JOINT_ATTENTION, DispatchedJointAttention
from phalanx.models.flow.embeds import masked_texts
from phalanx.models.flow.family import Embeds, FlowModel, check_size, latent_frames
from phalanx.models.recompute import run_block

TEXT, GLYPHS, IMAGE = 0, 1, 2  # kinds of tokens: indices into the model's cond_type_embed
FPS = 24  # frame rate of the videos that the model was trained on
GUIDER = "ClassifierFreeGuidance"


class Transformer(HunyuanVideo15Transformer3DModel):
    """diffusers' transformer, with the same modules and weights, and all conditioning tokens in one tensor.

    diffusers' own sorts the tokens of each row by their masks, on the host, and without an image still computes its 729
    tokens. Text tokens have no positions, so that their order does not matter.
    """

    _cp_plan: ClassVar[dict[str, Any]] = {
        "transformer_blocks.0": dict.fromkeys(
            ("hidden_states", "encoder_hidden_states"), ContextParallelInput(split_dim=1, expected_dims=3)
        ),
        "transformer_blocks.*": {"attention_mask": ContextParallelInput(split_dim=1, expected_dims=2)},
        "rope": dict.fromkeys((0, 1), ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)),
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        kinds: Tensor,
        attention_mask: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Velocity [N, C, F, H, W] of latents with conditions [N, C', F, H, W] at timestep [N], in 0..1000.

        kinds: [N, L], kinds of the tokens [N, L, D]. attention_mask: [N, L], False for padding.
        """
        assert not return_dict
        frames, height, width = hidden_states.shape[2:]
        rope, condition = self.rope(hidden_states), self.time_embed(timestep)
        tokens = self.x_embedder(hidden_states)
        texts = kinds == TEXT
        if attention_mask is not None:
            texts = texts & attention_mask
        text = self.context_embedder(encoder_hidden_states, timestep, texts)
        glyphs = self.context_embedder_2(encoder_hidden_states[..., : self.config.text_embed_2_dim])
        image = self.image_embedder(encoder_hidden_states[..., : self.config.image_embed_dim])
        kind = kinds[..., None]
        text = torch.where(kind == TEXT, text, torch.where(kind == GLYPHS, glyphs, image)) + self.cond_type_embed(kinds)
        for block in self.transformer_blocks:
            tokens, text = run_block(self, block, tokens, text, condition, attention_mask, rope)
        out = self.proj_out(self.norm_out(tokens, condition))
        return (self._join_patches(out, frames, height, width),)

    def _join_patches(self, tokens: Tensor, frames: int, height: int, width: int) -> Tensor:
        """[N, L, C p] -> [N, C, F, H, W]."""
        t, p = self.config.patch_size_t, self.config.patch_size
        cut = tokens.view(len(tokens), frames // t, height // p, width // p, -1, t, p, p)
        return cut.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(len(tokens), -1, frames, height, width)


class Model(FlowModel):
    """HunyuanVideo 1.5: latents [N, 32, (F - 1) / 4 + 1, H/16, W/16] of videos [N, F, 3, H, W].

    Latents with one frame are images [N, 3, H, W]. Guidance by `rollout.guidance_scale`.
    """

    pipeline_class = "HunyuanVideo15Pipeline"
    lora_pipeline = "HunyuanVideoPipeline"
    transformer_class = Transformer
    makes_videos = True
    fps = FPS
    masks_text = True
    input_channels = (2, 1)  # the latents, those of a first frame, and its mask
    # the layers of UniRL's recipe: all but the modulation
    lora_targets = (
        *JOINT_ATTENTION, "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"
    )  # fmt: skip

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        if self.transformer.config.use_meanflow:
            raise ValueError(
                f"model.path: {config.path!r} is distilled to few steps (use_meanflow), which is not supported"
            )
        guider = self.pipeline.guider
        scales = {name: value for name, value in guider.config.items() if not name.startswith("_")}
        plain = {"guidance_rescale": 0, "use_original_formulation": False, "start": 0, "stop": 1, "enabled": True}
        if type(guider).__name__ != GUIDER or scales | plain != scales:
            raise ValueError(f"model.path: the guider of {config.path!r} should be a {GUIDER} with {plain}")
        # tiles of 256 pixels, because a whole video of the model's sizes takes tens of GB; and samples one by one,
        # because the mask of the VAE's attention does not support batches
        self.vae.enable_tiling()
        self.vae.enable_slicing()

    @staticmethod
    def adapt(transformer: Any) -> None:
        for block in transformer.transformer_blocks:
            block.attn.set_processor(DispatchedJointAttention())

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of the text and of the template after it; tokens of the template before it are dropped."""
        p = self.pipeline
        chats = format_text_input(texts, p.system_message)
        filled = p.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        tokens = p.tokenizer(filled)["input_ids"]
        read = [ids[p.prompt_template_encode_start_idx :] for ids in tokens]
        return p.tokenizer, read, min(max_length, p.tokenizer_max_length)

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """`prompt_embeds` [L, D] and `kinds` [L]: tokens of the text, then those of its quoted parts.

        The embeddings of quoted parts (glyphs) are narrower, and padded with zeros.
        """
        p = self.pipeline
        length = min(max_length, p.tokenizer_max_length)
        cut = {"system_message": p.system_message, "crop_start": p.prompt_template_encode_start_idx}
        text, mask = p._get_mllm_prompt_embeds(p.text_encoder, p.tokenizer, texts, device, length, **cut)
        glyphs, glyph_mask = p._get_byt5_prompt_embeds(
            p.tokenizer_2, p.text_encoder_2, texts, device, p.tokenizer_2_max_length
        )
        embeds = []
        for i in range(len(texts)):
            parts = text[i][mask[i].bool()].cpu(), glyphs[i][glyph_mask[i].bool()].to("cpu", text.dtype)
            kinds = torch.tensor([TEXT, GLYPHS]).repeat_interleave(torch.tensor([len(part) for part in parts]))
            wide = pad(parts[1], (0, text.shape[-1] - parts[1].shape[-1]))
            embeds.append({"prompt_embeds": torch.cat([parts[0], wide]), "kinds": kinds})
        return embeds

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        return min(max_length, self.pipeline.tokenizer_max_length) + self.pipeline.tokenizer_2_max_length

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        """As `masked_texts`, with `kinds` [N, length]."""
        kinds = [pad(e["kinds"], (0, length - len(e["kinds"]))) for e in embeds]
        return masked_texts(embeds, length, padded) | {"kinds": torch.stack(kinds)}

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        latents = self.latent_shape(height, width, frames)[1] // self.transformer.config.patch_size_t
        return {f"a video of {frames} x {height} x {width}": latents * self.tokens(height, width)}

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor, step = self.vae.spatial_compression_ratio, self.vae.temporal_compression_ratio
        check_size(height, width, factor * self.transformer.config.patch_size)
        count = latent_frames(frames, step)
        channels = self.transformer.config.out_channels
        return (channels, count, height // factor, width // factor)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        x = latents.to(self.dtype)
        return self.transformer(
            hidden_states=torch.cat([x, self.conditions(x, embeds)], 1),
            timestep=timesteps.to(self.dtype),
            encoder_hidden_states=embeds["prompt_embeds"],
            kinds=embeds["kinds"],
            attention_mask=embeds.get("attention_mask"),
        )[0]

    def conditions(self, latents: Tensor, embeds: Embeds) -> Tensor:
        """Additional channels [N, C, F, H, W]: a first frame and its mask, both zero in text to video."""
        channels = self.transformer.config.in_channels - latents.shape[1]
        return latents.new_zeros(len(latents), channels, *latents.shape[2:])

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_frames(latents / self.vae.config.scaling_factor)

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.posterior(images[:, :, None], generator) * self.vae.config.scaling_factor

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        text = torch.empty(length, self.transformer.config.text_embed_dim, dtype=self.dtype)
        return {"prompt_embeds": text, "kinds": torch.zeros(length, dtype=torch.long)}
