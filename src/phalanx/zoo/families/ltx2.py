"""LTX-2 (arXiv 2601.03233), text to video: a stream of video tokens and one of audio, which attend to each other."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import LTX2VideoTransformer3DModel
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb, apply_split_rotary_emb
from torch import Tensor
from torch.nn.functional import pad

from phalanx.config.flow import FlowDataConfig
from phalanx.config.messages import check_divides, near_multiples
from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed.context_parallel import KEY
from phalanx.models.flow.attention import sharing_ranks
from phalanx.models.flow.family import Embeds, FlowModel, check_size, latent_frames

FPS = 24  # frame rate of the videos, from which the transformer computes the times of both streams
# names of layers outside of the blocks in the model's own code, by diffusers' names
NATIVE = {
    "proj_in": "patchify_proj", "audio_proj_in": "audio_patchify_proj",
    "time_embed": "adaln_single", "audio_time_embed": "audio_adaln_single",
    "prompt_adaln": "prompt_adaln_single", "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
}  # fmt: skip
UNUSED = ("audio_vae", "vocoder", "processor", "prompt_enhancer", "duration_head")


def context_plan(rope_type: str) -> dict[str, Any]:
    """A plan for diffusers that splits both streams and all positions, but not texts.

    The token dimension of positions depends on `rope_type`.
    """
    dim, dims = (2, 4) if rope_type == "split" else (1, 3)
    position = ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=True)
    stream = ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)
    whole = ContextParallelOutput(gather_dim=1, expected_dims=3)
    plan: dict[str, Any] = {"proj_in": {0: stream}, "audio_proj_in": {0: stream}}
    for rope in ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope"):
        plan[rope] = {0: position, 1: position}
    return plan | {"proj_out": whole, "audio_proj_out": whole}


class SharedAttention:
    """The attention of the model's blocks for ranks that share tokens, with different numbers of queries and keys.

    count: number of keys to attend to, without the padding that gives all ranks equal parts of the audio; None: all.
    """

    _attention_backend: Any = None  # diffusers' default backend
    _parallel_config: Any = None
    count: int | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        query_rotary_emb: tuple[Tensor, Tensor] | None = None,
        key_rotary_emb: tuple[Tensor, Tensor] | None = None,
        perturbation_mask: None = None,
        all_perturbed: bool = False,
    ) -> Tensor:
        """hidden_states [N, L, D], and encoder_hidden_states [N, S, D'] of another stream or of a text -> [N, L, D].

        A text has no positions, and is replicated on each rank.
        """
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source)), attn.to_v(source)
        if query_rotary_emb is not None:
            rotated = apply_split_rotary_emb if attn.rope_type == "split" else apply_interleaved_rotary_emb
            q, k = rotated(q, query_rotary_emb), rotated(k, key_rotary_emb or query_rotary_emb)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        ranks = None if query_rotary_emb is None else sharing_ranks(self._parallel_config)
        if ranks is not None:
            q, k, v = (ranks.exchange(x, 2, 1) for x in (q, k, v))
        out = dispatch_attention_fn(q, k[:, : self.count], v[:, : self.count], backend=self._attention_backend)
        if ranks is not None:
            out = ranks.exchange(out, 1, 2)
        if attn.to_gate_logits is not None:
            out = out * (2 * attn.to_gate_logits(hidden_states).sigmoid()).unsqueeze(-1)
        return attn.to_out[1](attn.to_out[0](out.flatten(2, 3).to(q.dtype)))


class Model(FlowModel):
    """LTX-2: latents [N, L, 128] of videos [N, F, 3, H, W], with the video's tokens first, then those of its audio.

    Both are sampled and trained together, with the same guidance `rollout.guidance_scale`; the audio is not decoded.
    """

    pipeline_class = "LTX2Pipeline"
    transformer_class = LTX2VideoTransformer3DModel
    makes_videos = True
    fps = FPS
    encodes_images = False
    # the layers of all attention: within each stream, between them, and to the text
    lora_targets = ("to_k", "to_out.0", "to_q", "to_v")

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        super().__init__(config, dtype, weights_dtype)
        c, vae = self.transformer.config, self.vae.config
        sizes = (c.patch_size, c.patch_size_t, c.audio_in_channels)
        if sizes != (1, 1, c.in_channels):
            raise ValueError(
                f"model.path: the transformer of {config.path!r} should have patches of 1 and as many channels of "
                "sound as of video"
            )
        if vae.timestep_conditioning or np.any(vae.decoder_inject_noise):
            raise ValueError(f"model.path: the VAE of {config.path!r} decodes with noise, which is not supported")
        connectors = self.pipeline.connectors.config
        self.registers = connectors.video_connector_num_learnable_registers
        if not self.registers or self.registers != connectors.audio_connector_num_learnable_registers:
            raise ValueError(f"model.path: the connectors of {config.path!r} should have registers, as many for both")
        self.text_encoders.append(self.pipeline.connectors)
        self.shared_by = 1  # number of ranks that share a sample's tokens

    @classmethod
    def lora_names(cls, layers: Sequence[str]) -> dict[str, str]:
        """The model's own names: ComfyUI reads only these, and diffusers reads them too."""
        names = {}
        for layer in layers:
            head, dot, rest = layer.partition(".")
            names[layer] = f"diffusion_model.{NATIVE.get(head, head)}{dot}{rest}"
        return names

    def components(self, path: str) -> dict[str, Any]:
        """None for components that decode audio, rewrite prompts or choose the length of a video."""
        return dict.fromkeys(UNUSED)

    def prepare_sharing(self, size: int) -> None:
        heads = self.transformer.config.audio_num_attention_heads
        check_divides(KEY, size, heads, "the {} attention heads of the model's sound")
        self.shared_by, self.sound, others = size, SharedAttention(), SharedAttention()
        block: Any = self.blocks()[0]
        self.sound._attention_backend = others._attention_backend = block.attn1.processor._attention_backend
        self.transformer.set_attn_processor(others)
        for block in self.blocks():
            block.audio_attn1.set_processor(self.sound)
            block.audio_to_video_attn.set_processor(self.sound)

    def context_plan(self) -> dict[str, Any]:
        return context_plan(self.transformer.config.rope_type)

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        return {f"a video of {frames} x {height} x {width}": self.shifting_tokens(height, width, frames)}

    def check_length(self, data: FlowDataConfig) -> None:
        max_length = data.max_prompt_length
        if max_length % self.registers:
            raise ValueError(
                f"data.max_prompt_length: {max_length} should be a multiple of {self.registers}, the number of learned "
                f"tokens that LTX-2 pads texts with, e.g. {near_multiples(max_length, self.registers)}"
            )

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """Tokens of the texts without surrounding whitespace, as in the pipeline."""
        return super().text_tokens([text.strip() for text in texts], max_length)

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """`prompt_embeds` [max_length, D] and `sound_embeds` [max_length, D'].

        They are padded with learned tokens, to which the model attends.
        """
        p = self.pipeline
        hidden, mask = p._get_gemma_prompt_embeds(texts, max_sequence_length=max_length, device=device)
        video, sound, _ = p.connectors(hidden, mask, padding_side=p.tokenizer.padding_side)
        return [{"prompt_embeds": video[i].cpu(), "sound_embeds": sound[i].cpu()} for i in range(len(texts))]

    def tokens(self, height: int, width: int) -> int:
        unit = self.pipeline.vae_spatial_compression_ratio
        return (height // unit) * (width // unit)

    def shifting_tokens(self, height: int, width: int, frames: int) -> int:
        """Number of tokens of all frames of a video."""
        return latent_frames(frames, self.pipeline.vae_temporal_compression_ratio) * self.tokens(height, width)

    def sound_tokens(self, latent_frames: int) -> int:
        """Number of tokens of a video's audio."""
        c = self.transformer.config
        frames = (latent_frames - 1) * self.pipeline.vae_temporal_compression_ratio + 1
        return round(frames / FPS * (c.audio_sampling_rate / c.audio_hop_length / float(c.audio_scale_factor)))

    def grid(self, length: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, rows and columns of the video among `length` tokens."""
        unit, frames = self.pipeline.vae_spatial_compression_ratio, 1
        while frames * self.tokens(height, width) + self.sound_tokens(frames) < length:
            frames += 1
        return frames, height // unit, width // unit

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        check_size(height, width, self.pipeline.vae_spatial_compression_ratio)
        latents = latent_frames(frames, self.pipeline.vae_temporal_compression_ratio)
        return (latents * self.tokens(height, width) + self.sound_tokens(latents), self.transformer.config.in_channels)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        frames, rows, columns = self.grid(latents.shape[1], height, width)
        video, sound = latents.to(self.dtype).tensor_split([frames * rows * columns], 1)
        if self.shared_by > 1:
            self.sound.count = sound.shape[1]
            sound = pad(sound, (0, 0, 0, -sound.shape[1] % self.shared_by))
        velocities = self.transformer(
            hidden_states=video,
            audio_hidden_states=sound,
            encoder_hidden_states=embeds["prompt_embeds"],
            audio_encoder_hidden_states=embeds["sound_embeds"],
            timestep=timesteps,
            sigma=timesteps,
            num_frames=frames,
            height=rows,
            width=columns,
            fps=FPS,
            audio_num_frames=sound.shape[1],
            use_cross_timestep=True,  # both streams have the same timestep
            return_dict=False,
        )
        return torch.cat(velocities, 1)[:, : latents.shape[1]]

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        frames, rows, columns = self.grid(latents.shape[1], height, width)
        video = latents[:, : frames * rows * columns]
        video = self.pipeline._unpack_latents(video, frames, rows, columns)
        vae = self.vae
        scale = vae.config.scaling_factor
        return self.decode_frames(self.pipeline._denormalize_latents(video, vae.latents_mean, vae.latents_std, scale))

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        connectors = self.pipeline.connectors
        widths = connectors.video_connector.inner_dim, connectors.audio_connector.inner_dim
        names = "prompt_embeds", "sound_embeds"
        return {name: torch.empty(length, width, dtype=self.dtype) for name, width in zip(names, widths, strict=True)}
