"""What a family of flow-matching models must provide; a new family is one file with a class `Model`."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.config.schema import ModelConfig
from phalanx.flops import forward_flops
from phalanx.models.folder import check_components, check_tensors, read_index
from phalanx.pictures import Picture

Embeds = dict[str, Tensor]


@dataclass(frozen=True)
class Instruction:
    """A text about an image, by which images of `size` (height, width) pixels are made. Its str names its contents."""

    text: str
    picture: Picture
    size: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.text}\n{self.picture.digest} {self.size[0]} {self.size[1]}"


class FlowModel:
    """A model that makes images of texts, some with an image beside the text, in diffusers' own classes. N rows are
    samples, noise levels and guidance branches alike.
    """

    pipeline_class: str
    guidance_key: str  # of classifier-free guidance, which takes a second branch of the forward pass
    embedded_guidance_key: str | None = None  # of a guidance that the model was distilled to take as an input
    lora_targets: Sequence[str]
    default_negative: str
    makes_videos: bool = False  # whether samples can have more than one frame
    fps: int = 1  # frames a second of its videos
    vae_dtype: torch.dtype | None = None  # that the VAE is read and computes in; None: the model's
    masks_text: bool = False  # whether attention takes a mask where prompts differ in length
    image_column: str | None = None  # of the data: the image that a prompt is about; None: the model takes texts alone
    shared_inputs: Sequence[str] = ()  # of `forward_inputs`, those that all rows of a batch share

    pipeline: Any
    transformer: Any
    vae: Any
    text_encoders: list[nn.Module]
    dtype: torch.dtype

    def __init__(self, config: ModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        """Load from `config.path`: the transformer in `weights_dtype`, everything else in `dtype`, or `vae_dtype`."""
        raise AssertionError("a family loads itself")

    def load(
        self, config: ModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype, pipeline: Any, transformer: Any
    ) -> None:
        """Set `pipeline`, `transformer`, `vae` and `dtype` from a folder, by diffusers' two classes."""
        given = absent_components(model_index(config.path)) | self.components(config.path)
        self.dtype = dtype
        self.transformer = transformer.from_pretrained(config.path, subfolder="transformer", torch_dtype=weights_dtype)
        others = {"default": dtype, "vae": self.vae_dtype or dtype}
        self.pipeline = pipeline.from_pretrained(config.path, transformer=self.transformer, torch_dtype=others, **given)
        self.vae = self.pipeline.vae
        check_tensors(config.path, transformer=self.transformer, vae=self.vae)
        # not diffusers' own `to`, which warns of parts that it would keep in float32: here all weights have one dtype
        nn.Module.to(self.transformer, weights_dtype)

    def components(self, path: str) -> dict[str, Any]:
        """Components that the family loads itself, by their names in the pipeline."""
        return {}

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks: the units of sharding, compilation and checkpointing."""
        return list(self.transformer.transformer_blocks)

    def heads(self) -> tuple[int, int]:
        """Attention heads, and the size of one."""
        c = self.transformer.config
        return c.num_attention_heads, c.attention_head_dim

    def check_length(self, max_length: int) -> None:
        """Raise ValueError where the model cannot take prompts of `max_length` tokens, and warn where it takes them
        badly; before any is encoded.
        """

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """Text embeddings of each prompt, on the CPU: `prompt_embeds` [L, D] and others.

        There is no padding that attention would have to mask; what the model attends to as it was trained stays.
        """
        raise AssertionError

    def encode_instruction(self, instruction: Instruction, device: torch.device, max_length: int) -> Embeds:
        """As `encode`, where there is an `image_column`: the embeddings of a text and its image.

        Raises ValueError for an image that cannot be read.
        """
        raise AssertionError

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        """The most tokens of `prompt_embeds` of a prompt of `max_length` tokens."""
        return max_length

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        """Stack embeddings to [N, length, D]; `padded` says whether some prompt of the world's step is shorter."""
        raise AssertionError

    def schedule(self, num_inference_steps: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        """sigmas [N + 1] and timesteps [N] float32 of the model folder's own scheduler."""
        raise AssertionError

    def linear_schedule(self, num_inference_steps: int, tokens: int) -> tuple[Tensor, Tensor]:
        """`schedule` as pipelines with `calculate_shift` make it: even levels 1 .. 1/N, then the scheduler's shift,
        which depends on the image's `tokens` where the folder says so (`use_dynamic_shifting`).
        """
        scheduler, even = self.pipeline.scheduler, np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        scheduler.set_timesteps(sigmas=even, mu=self.dynamic_shift(tokens))
        return scheduler.sigmas.float().cpu(), scheduler.timesteps.float().cpu()

    def dynamic_shift(self, tokens: int) -> float:
        """diffusers' mu of an image of so many tokens."""
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        c = self.pipeline.scheduler.config
        return calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)

    def tokens(self, height: int, width: int) -> int:
        """Image tokens of the transformer."""
        raise AssertionError

    def shift(self, height: int, width: int) -> float:
        """s by which the scheduler moves the noise levels of an image: s t / (1 + (s - 1) t)."""
        c = self.pipeline.scheduler.config
        if not c.use_dynamic_shifting:
            return float(c.shift)
        mu = self.dynamic_shift(self.tokens(height, width))
        return math.exp(mu) if c.time_shift_type == "exponential" else mu

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Shape of one sample's latent; raises ValueError where the model cannot make such an image."""
        raise AssertionError

    def sample_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """`latent_shape` of a sample of so many frames, which is an image where there is one."""
        assert frames == 1, "a family that makes videos says how"
        return self.latent_shape(height, width)

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        """One forward pass: latents [N, ...], timesteps [N] in 0..1000, embeds [N, ...] -> [N, ...].

        With an `embedded_guidance_key`, `embeds` also has `guidance` [N] float32, the scale.
        """
        raise AssertionError

    def guide(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance of two velocities, float32."""
        return negative + scale * (positive - negative)

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Images [N, 3, H, W], or videos [N, F, 3, H, W], in 0..1, float32."""
        raise AssertionError

    def latent_statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [C, 1, 1, 1] of the latents of a VAE for videos."""
        c = self.vae.config
        mean, std = torch.tensor([c.latents_mean, c.latents_std], device=device)
        return mean.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)

    def frame_latents(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Images [N, 3, H, W] as videos of one frame: a video VAE's latents [N, C, 1, h, w], of mean 0 and std 1."""
        mean, std = self.latent_statistics(images.device)
        posterior = self.vae.encode((images * 2 - 1).to(self.vae.dtype)[:, :, None]).latent_dist
        latents = posterior.mode() if generator is None else posterior.sample(generator)
        return (latents.float() - mean) / std

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Latents [N, ...] float32 of images [N, 3, H, W] in 0..1: the inverse of `decode`."""
        raise AssertionError

    def flops(self, height: int, width: int, text_length: int, frames: int = 1) -> int:
        """Floating-point operations of one forward pass of one sample."""
        kind, config = type(self.transformer), self.transformer.config
        shape = self.sample_shape(height, width, frames)
        return forward_flops(
            lambda: kind.from_config(config), lambda: self.inputs_like(shape, height, width, text_length)
        )

    def inputs_like(self, shape: tuple[int, ...], height: int, width: int, text_length: int) -> dict[str, Any]:
        """`forward_inputs` for a latent of this shape, in which alone the frames of a video show."""
        inputs = self.forward_inputs(height, width, text_length)
        if self.makes_videos:
            inputs["hidden_states"] = torch.empty(1, *shape)
        return inputs

    def forward_inputs(self, height: int, width: int, text_length: int) -> dict[str, Any]:
        """Arguments of the transformer's forward pass for one sample, of the right shapes, to count its arithmetic.

        Tensors are [1, ...], but for those of `shared_inputs`, which a batch of any number of rows has once.
        """
        raise AssertionError


class PackedModel(FlowModel):
    """A model of packed latents [N, (H/u)(W/u), C]: a token is a patch of 2 x 2 of the VAE's, u pixels a side."""

    def schedule(self, num_inference_steps: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        return self.linear_schedule(num_inference_steps, self.tokens(height, width))

    def tokens(self, height: int, width: int) -> int:
        rows, columns = self.grid(height, width)
        return rows * columns

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return (self.tokens(height, width), self.transformer.config.in_channels)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of image tokens; raises ValueError where the model cannot make such an image."""
        unit = self.pipeline.vae_scale_factor * 2  # what the pipelines' _pack_latents does, whatever patch_size says
        check_size(height, width, unit)
        return height // unit, width // unit


def decode_kl(vae: Any, latents: Tensor) -> Tensor:
    """Images [N, 3, H, W] in 0..1, float32, of an AutoencoderKL's scaled and shifted latents [N, C, h, w]."""
    c = vae.config
    images = vae.decode((latents / c.scaling_factor + c.shift_factor).to(vae.dtype), return_dict=False)[0]
    return (images.float() / 2 + 0.5).clamp(0, 1)


def encode_kl(vae: Any, images: Tensor, generator: torch.Generator | None) -> Tensor:
    """Latents [N, C, h, w] float32 of images [N, 3, H, W] in 0..1: the posterior's mode without a generator."""
    c = vae.config
    posterior = vae.encode((images * 2 - 1).to(vae.dtype)).latent_dist
    latents = posterior.mode() if generator is None else posterior.sample(generator)
    return (latents.float() - c.shift_factor) * c.scaling_factor


def check_size(height: int, width: int, unit: int, limit: int | None = None) -> None:
    """Raise ValueError where a side is no multiple of `unit` pixels, or longer than `limit`."""
    for name, size in (("height", height), ("width", width)):
        if size % unit:
            below = max(size // unit, 1) * unit
            raise ValueError(f"rollout.{name}: {size} should be a multiple of {unit}, e.g. {below} or {below + unit}")
        if limit is not None and size > limit:
            raise ValueError(f"rollout.{name}: {size} is more than the model's {limit} pixels")


def model_index(path: str) -> dict[str, Any]:
    """The model_index.json of a diffusers folder; raises ValueError where the folder is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.count("/") == 1 and not path.startswith((".", "/", "~")):
            return _hub_index(path)
        raise ValueError(f"model.path: {path!r}: no such folder")
    index = read_index(folder)
    check_components(folder, index)
    return index


def _hub_index(repo: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return dict(json.loads(Path(hf_hub_download(repo, "model_index.json")).read_text()))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        raise ValueError(f"model.path: {repo!r}: no such folder, and no hub has it within reach") from None


def absent_components(index: dict[str, Any]) -> dict[str, None]:
    """Components that the folder leaves out, as the keyword arguments that tell diffusers so."""
    return {name: None for name, value in index.items() if isinstance(value, list) and value[0] is None}
