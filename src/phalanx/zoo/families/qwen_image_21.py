"""Qwen-Image 2.1, text to image: one stream of tokens, in which text attends only to preceding tokens."""

from typing import Any, ClassVar

import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope
from torch import Tensor
from transformers import Qwen3VLProcessor

from phalanx.engines.loading import without_videos
from phalanx.models.flow.attention import image_heads, rotated, sharing_ranks
from phalanx.models.flow.embeds import masked_texts
from phalanx.models.flow.family import Embeds, PackedModel, check_size
from phalanx.models.recompute import run_block
from phalanx.zoo.families.qwen_image_edit import cut_text

TEMPLATE_TOKENS = 8  # tokens of the pipeline's template that are kept around a text
PromptProcessor = without_videos(Qwen3VLProcessor)


class CausalAttention:
    """The attention of the model's blocks, in one call for the text and one for the image after it."""

    _attention_backend: Any = None  # diffusers' default backend
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        layer_cache: None = None,
        kv_cache_mode: None = None,
        cache_write_slice: None = None,
        segments: int = 0,
        key_valid: None = None,
    ) -> Tensor:
        """hidden_states [N, L, D], rotary_emb [N, L, head_dim / 2, 2] -> [N, L, D].

        The first `segments` tokens are text; `attention_mask` [N, L'] is False for its padding. If ranks share tokens,
        each rank has a part of the text and a part of the image, and L' is the length of the whole text.
        """
        assert rotary_emb is not None
        q, k, v = image_heads(attn, hidden_states)
        q, k = rotated(q, rotary_emb).to(v.dtype), rotated(k, rotary_emb).to(v.dtype)
        text, image_q = [x[:, :segments] for x in (q, k, v)], q[:, segments:]
        ranks = sharing_ranks(self._parallel_config)
        if ranks is not None:
            text = [ranks.exchange(x, 2, 1) for x in text]
            image_q, *image_kv = (ranks.exchange(x[:, segments:], 2, 1) for x in (q, k, v))
            k, v = (torch.cat(pair, 1) for pair in zip(text[1:], image_kv, strict=True))
        # padding is after the text, where causal attention does not reach it
        backend = self._attention_backend
        text_out = dispatch_attention_fn(*text, is_causal=True, backend=backend)
        mask = attention_mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(image_q.shape[:2])], 1)[:, None, None]
        image_out = dispatch_attention_fn(image_q, k, v, attn_mask=mask, backend=backend)
        if ranks is not None:
            text_out, image_out = ranks.exchange(text_out, 1, 2), ranks.exchange(image_out, 1, 2)
        out = torch.cat([text_out, image_out], 1).flatten(2, 3).to(q.dtype)
        return attn.to_out[1](attn.to_out[0](out))


class Rotations(QwenImage21Rope):
    """Rotary embeddings of a text and of the image after it."""

    def forward(self, lengths: Tensor, length: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Rotations [N, length, head_dim / 2, 2] of the text and [N, rows x columns, head_dim / 2, 2] of the image.

        The positions are (j, j, j) for token j of a text, and for the image (the text's length in `lengths` [N], row,
        column), with row and column counted from the middle.
        """
        device, n = lengths.device, len(lengths)
        self.freqs: list[Tensor] = [table.to(device) for table in self.freqs]
        first, second, third = self.freqs
        text = torch.cat([table[:length] for table in self.freqs], -1).expand(n, -1, -1)
        row = torch.arange(rows // 2 - rows, rows // 2, device=device).repeat_interleave(columns)
        column = torch.arange(columns // 2 - columns, columns // 2, device=device).repeat(rows)
        place = torch.cat([second[row], third[column]], -1).expand(n, -1, -1)
        image = torch.cat([first[lengths][:, None].expand(-1, rows * columns, -1), place], -1)
        return torch.view_as_real(text), torch.view_as_real(image)


class Transformer(QwenImage21Transformer2DModel):
    """diffusers' transformer, with the same modules and weights, for texts of different lengths in a batch.

    diffusers' own computes positions from the padded text, so that an image would depend on its batch, and builds lists
    of tokens on the host. It has no context-parallel plan; here each rank has a part of the text, then of the image.
    """

    _cp_plan: ClassVar[dict[str, Any]] = {
        "txt_in": {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)},
        "img_in": {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)},
        "pos_embed": dict.fromkeys((0, 1), ContextParallelInput(split_dim=1, expected_dims=4, split_output=True)),
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        grid: tuple[int, int],
        attention_mask: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Velocity of latents [N, T, C] of `grid` (rows, columns) at timestep [N] in 0..1.

        The texts are [N, L, D]; `attention_mask` [N, L] is False for their padding.
        """
        assert not return_dict
        n, length = encoder_hidden_states.shape[:2]
        lengths = torch.full((n,), length, device=hidden_states.device)
        if attention_mask is not None:
            lengths = attention_mask.sum(1)
        rotations = torch.cat(self.pos_embed(lengths, length, *grid), 1)
        text, image = self.txt_in(encoder_hidden_states), self.img_in(hidden_states)
        length = text.shape[1]  # that of this rank's part
        tokens = torch.cat([text, image], 1)
        levels, is_image = timestep, None
        if self.config.causal_condition:  # texts are at level 0, the additional last row
            levels = torch.cat([timestep, timestep.new_zeros(1)])
            is_image = torch.arange(tokens.shape[1], device=tokens.device) >= length
        condition = self.time_text_embed(levels, image)
        modulation = self.modulation(condition)
        for block in self.transformer_blocks:
            inputs = tokens, modulation, rotations, attention_mask, is_image, None, None, None, length
            tokens = run_block(self, block, *inputs)
        return (self.proj_out(self.norm_out(tokens[:, length:], condition[:n])),)


class Model(PackedModel):
    """Qwen-Image 2.1: latents [N, (H/16)(W/16), 64], a token per latent; intended to be used without guidance."""

    pipeline_class = "QwenImage21Pipeline"
    transformer_class = Transformer
    guidance_key = "true_cfg_scale"
    default_negative = " "
    masks_text = True
    input_channels = (1, 0)
    # all but the modulation
    lora_targets = (
        "attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v", "img_mlp.gate_layer", "img_mlp.out", "img_mlp.proj",
    )  # fmt: skip

    @staticmethod
    def adapt(transformer: Any) -> None:
        rope = transformer.pos_embed
        transformer.pos_embed = Rotations(rope.theta, rope.axes_dim)
        for block in transformer.transformer_blocks:
            block.attn.set_processor(CausalAttention())

    def components(self, path: str) -> dict[str, Any]:
        return {"processor": PromptProcessor.from_pretrained(path, subfolder="processor", trust_remote_code=False)}

    def grid(self, height: int, width: int) -> tuple[int, int]:
        factor = self.pipeline.vae_scale_factor
        check_size(height, width, 2 * factor)  # required by the pipeline, although a token is one latent
        return height // factor, width // factor

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of the text without the template, see `cut_text`."""
        tokenizer = self.pipeline.processor.tokenizer
        return tokenizer, tokenizer(texts)["input_ids"], max_length

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """`prompt_embeds` [L, D] of texts truncated to `max_length` tokens, unlike in the stock pipeline."""
        embeds = []
        for text in texts:
            short = cut_text(self.pipeline.processor.tokenizer, text, max_length)
            encoded, _, _ = self.pipeline.encode_prompt(short, device=device)
            embeds.append({"prompt_embeds": encoded[0].cpu()})
        return embeds

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        return max_length + TEMPLATE_TOKENS

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        return masked_texts(embeds, length, padded)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        return self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=timesteps.to(self.dtype) / 1000,  # in this order, for the same rounding as in the pipeline
            encoder_hidden_states=embeds["prompt_embeds"],
            grid=self.grid(height, width),
            attention_mask=embeds.get("attention_mask"),
        )[0]

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """As FlowModel.decode; the VAE's images have an alpha channel, and are composited over white."""
        mean, std = self.latent_statistics(latents.device)
        pixels = self.decode_frames(self.unpack(latents, height, width) * std + mean)
        color, opacity = pixels[:, :3], pixels[:, 3:]
        return color * opacity + (1 - opacity)

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        opaque = torch.cat([images, torch.ones_like(images[:, :1])], 1)
        return self.pack(self.frame_latents(opaque, generator))

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        return {"prompt_embeds": torch.empty(length, self.transformer.config.context_in_dim, dtype=self.dtype)}
