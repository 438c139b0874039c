"""Z-Image and Z-Image-Turbo (arXiv 2511.22699): text and image in one stream of tokens."""

import re
from collections.abc import Collection, Iterable
from typing import Any

import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor
from torch.nn.functional import pad

from phalanx.config.flow import FlowDataConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.embeds import chat_tokens, masked_texts
from phalanx.models.flow.family import Embeds, FlowModel, check_size
from phalanx.models.flow.folder import read_lora
from phalanx.models.lora import Layers, lora_key
from phalanx.models.recompute import run_block

PATCH = 2  # side of an image token, in latents
UNIT = 32  # texts and images are padded to a multiple of this many tokens, with learned tokens that are attended to


class Transformer(ZImageTransformer2DModel):
    """diffusers' transformer, with the same modules and weights, and a batched forward pass.

    diffusers' own takes lists and pads them to the longest in the batch, so that a sample's last bits would depend on
    the others, and it prepares rows one by one. Here everything that differs between rows is in tensors.
    """

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        text_mask: Tensor,
        attention_mask: Tensor | None = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        """Velocity towards the image, at latents [N, C, H, W] and timestep [N], which is 0 for noise.

        Where `text_mask` [N, L] is False, the learned token replaces the text embeddings [N, L, D]; `attention_mask`
        [N, L] is False for padding that is not attended to. L is a multiple of UNIT.
        """
        assert not return_dict
        n, _, height, width = hidden_states.shape
        condition = self.t_embedder(timestep * self.t_scale).type_as(hidden_states)
        lengths = text_mask.shape[1] if attention_mask is None else attention_mask.sum(1, keepdim=True)

        image = self.all_x_embedder[f"{PATCH}-1"](_split_patches(hidden_states))
        tokens = image.shape[1]
        filler = self.x_pad_token.to(image.dtype).expand(n, -tokens % UNIT, -1)
        image = torch.cat([image, filler], 1)
        # positions are (1 + the text's length, row, column) for image tokens, and 0 for their padding
        grid = self._grid_positions((1, height // PATCH, width // PATCH), image).repeat(n, 1, 1)
        grid[..., 0] += lengths
        image_rope = self._rotary_embeddings(pad(grid, (0, 0, 0, image.shape[1] - tokens)))
        for block in self.noise_refiner:
            image = run_block(self, block, image, None, image_rope, condition)

        text = self.cap_embedder(encoder_hidden_states)
        text = torch.where(text_mask[..., None], text, self.cap_pad_token.to(text.dtype))
        # positions are (1 + j, 0, 0) for token j
        text_rope = self._rotary_embeddings(self._grid_positions((text.shape[1], 1, 1), text).expand(n, -1, -1))
        for block in self.context_refiner:
            text = run_block(self, block, text, attention_mask, text_rope)

        both, rope, mask = torch.cat([image, text], 1), torch.cat([image_rope, text_rope], 1), None
        if attention_mask is not None:
            mask = torch.cat([attention_mask.new_ones(n, image.shape[1]), attention_mask], 1)
        for block in self.layers:
            both = run_block(self, block, both, mask, rope, condition)
        out = self.all_final_layer[f"{PATCH}-1"](both, c=condition)
        return (_join_patches(out[:, :tokens], height, width),)

    def _rotary_embeddings(self, positions: Tensor) -> Tensor:
        """Rotary embeddings [N, L, head_dim / 2] of positions [N, L, 3]."""
        return self.rope_embedder(positions.flatten(0, 1)).unflatten(0, positions.shape[:2])

    def _grid_positions(self, size: tuple[int, int, int], like: Tensor) -> Tensor:
        """Positions [L, 3] of a grid with origin (1, 0, 0)."""
        return self.create_coordinate_grid(size, (1, 0, 0), like.device).flatten(0, 2)


def _split_patches(latents: Tensor) -> Tensor:
    """[N, C, H, W] -> [N, (H / 2)(W / 2), 4 C], with the channel as the fastest index."""
    n, c, h, w = latents.shape
    cut = latents.view(n, c, h // PATCH, PATCH, w // PATCH, PATCH)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(n, -1, PATCH * PATCH * c)


def _join_patches(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `_split_patches`."""
    n, h, w = len(tokens), height // PATCH, width // PATCH
    cut = tokens.view(n, h, w, PATCH, PATCH, -1)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(n, -1, height, width)


def _is_repeated(name: str, names: Collection[str]) -> bool:
    """Whether a tensor is of the fused `qkv`, or of `out`, in a LoRA that has to_q, to_k, to_v or to_out as well."""
    fused = re.fullmatch(r"(.+attention[._])(qkv|out)\.(lora.+|alpha)", name)
    return fused is not None and any(other.startswith((f"{fused[1]}to_", f"{fused[1]}to.")) for other in names)


class Model(FlowModel):
    """Z-Image: latents [N, 16, H/8, W/8]; guidance by `rollout.guidance_scale`, which Turbo does not need."""

    pipeline_class = "ZImagePipeline"
    transformer_class = Transformer
    patch = PATCH
    masks_text = True
    block_lists = ("noise_refiner", "context_refiner", "layers")  # of the image, of the text, and of both
    # the layers of Flow-Factory's recipes: all but the modulation
    lora_targets = (
        "attention.to_k", "attention.to_out.0", "attention.to_q", "attention.to_v",
        "feed_forward.w1", "feed_forward.w2", "feed_forward.w3",
    )  # fmt: skip

    @classmethod
    def read_lora(cls, path: str, config: FlowModelConfig | None = None, names: Iterable[str] = ()) -> Layers:
        """As for other models; the model's own fused layer `qkv` is split, and its `out` named as in diffusers."""
        layers: Layers = {}
        for name, (down, up) in read_lora(path, ZImagePipeline, _is_repeated, lora_key(config)).items():
            block, _, layer = name.rpartition(".attention.")
            if layer == "qkv":
                for part, rows in zip(("to_q", "to_k", "to_v"), up.chunk(3), strict=True):
                    layers[f"{block}.attention.{part}"] = down, rows
            else:
                layers[f"{block}.attention.to_out.0" if layer == "out" else name] = down, up
        return layers

    def heads(self) -> tuple[int, int]:
        c = self.transformer.config
        return c.n_heads, c.dim // c.n_heads

    def check_length(self, data: FlowDataConfig) -> None:
        # a text's positions begin at 1, and the image has the one after the text's
        limit = self.transformer.config.axes_lens[0] - 2
        if _padded_length(data.max_prompt_length) > limit:
            raise ValueError(
                f"data.max_prompt_length: {data.max_prompt_length} is more than the model's "
                f"{limit // UNIT * UNIT} tokens"
            )

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of the chat template with the text."""
        tokenizer = self.pipeline.tokenizer
        return tokenizer, chat_tokens(tokenizer, texts, enable_thinking=True), max_length

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """`prompt_embeds` [L, D], L a multiple of UNIT, and `text_mask` [L], False for padding by the learned token."""
        # copied, because the pipeline replaces the list's prompts by chats
        texts_embeds, _ = self.pipeline.encode_prompt(
            list(texts), device=device, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        embeds = []
        for text in texts_embeds:
            n, length = len(text), _padded_length(len(text))
            padded = pad(text.cpu(), (0, 0, 0, length - n))
            embeds.append({"prompt_embeds": padded, "text_mask": torch.arange(length) < n})
        return embeds

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        return _padded_length(max_length)

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        """As `masked_texts`, with `text_mask` [N, length]."""
        kept = [pad(e["text_mask"], (0, length - len(e["text_mask"]))) for e in embeds]
        return masked_texts(embeds, length, padded) | {"text_mask": torch.stack(kept)}

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor, c = self.pipeline.vae_scale_factor, self.transformer.config
        check_size(height, width, factor * PATCH, min(c.axes_lens[1:]) * factor * PATCH)
        return (c.in_channels, height // factor, width // factor)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        out = self.transformer(
            hidden_states=latents.to(self.dtype),
            timestep=(1000 - timesteps) / 1000,
            encoder_hidden_states=embeds["prompt_embeds"],
            text_mask=embeds["text_mask"],
            attention_mask=embeds.get("attention_mask"),
        )[0]
        return -out  # the model predicts the velocity towards the image

    def guide(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """As in the pipeline, where scale 0 is the positive branch."""
        return positive + scale * (positive - negative)

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        filled = _padded_length(length)
        text = torch.empty(filled, self.transformer.config.cap_feat_dim, dtype=self.dtype)
        return {"prompt_embeds": text, "text_mask": torch.ones(filled, dtype=torch.bool)}


def _padded_length(length: int) -> int:
    """Number of tokens of a text with its padding."""
    return length + -length % UNIT
