"""Base class of the families of flow-matching models. Each family is one file with a class `Model`."""

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import diffusers
import numpy as np
import torch
import transformers
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor, nn

from phalanx.config.flow import FlowDataConfig
from phalanx.config.messages import near_multiples
from phalanx.config.trained_model import FlowModelConfig
from phalanx.functional.flow import Sampler
from phalanx.kept import kept
from phalanx.media.pictures import Picture
from phalanx.models.flow.folder import (
    base_folder,
    check_parts,
    ignored_named,
    load_text_encoder,
    load_transformer,
    model_index,
)
from phalanx.models.flow.gelu import use_sigmoid
from phalanx.models.flow.model_files import ModelFiles
from phalanx.models.flow.pipeline_headers import absent_components, component_names
from phalanx.telemetry.flops import forward_flops

Embeds = dict[str, Tensor]


@dataclass(frozen=True)
class Instruction:
    """A prompt about an image, for samples of `size` (height, width) pixels, with `frames` frames if they are videos.

    `str()` of it identifies its contents, as a cache key.
    """

    text: str
    picture: Picture
    size: tuple[int, int]
    frames: int = 1

    def __str__(self) -> str:
        length = f" {self.frames}" if self.frames > 1 else ""
        return f"{self.text}\n{self.picture.digest} {self.size[0]} {self.size[1]}{length}"


class FlowModel(ModelFiles):
    """A text-to-image or text-to-video model; some families condition on an image as well.

    Its components are instances of diffusers' classes. In batches [N, ...], a row is any combination of sample, noise
    level and guidance branch.
    """

    transformer_class: Any  # diffusers' class, or a subclass of it
    guidance_key: str = "guidance_scale"  # config key of the classifier-free guidance scale
    embedded_guidance_key: str | None = None  # config key of the scale that a guidance-distilled model takes as input
    distilled: bool = False  # True if the model was trained to sample without classifier-free guidance
    # True if the folder may have a second transformer, which takes some of the steps with its own guidance scale
    second_guidance: bool = False
    lora_targets: ClassVar[Sequence[str]]
    input_channels: tuple[int, int] | None = (1, 0)  # of the transformer: a multiple of the VAE's, and further ones
    default_negative: str = ""
    block_lists: ClassVar[Sequence[str]] = ("transformer_blocks",)  # lists of the transformer's repeated blocks
    makes_videos: bool = False  # True if samples can have more than one frame
    fps: int = 1  # frames per second of its videos
    encodes_images: bool = True  # False if latents cannot be encoded from images alone
    vae_dtype: torch.dtype | None = None  # dtype in which the VAE is loaded and computes; None: the model's
    masks_text: bool = False  # True if attention takes a mask when prompts differ in length
    # column of the data with the image that a prompt is about; None: the model takes only text
    image_column: str | None = None
    takes_several: bool = False  # True if that column may have a list of `model.reference_count` images
    omni_pipeline: str | None = None  # module:class of its pipeline in phalanx.zoo.engines.omni, if any

    pipeline: Any
    transformer: Any
    vae: Any
    text_encoders: list[nn.Module]
    dtype: torch.dtype

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        """Load `config.path`: the transformer for weights of `weights_dtype`, everything else in `dtype`.

        Without a LoRA, the transformer's parameters may keep the dtype of their files, and the caller casts them; see
        phalanx.models.stored.
        """
        # every rank would draw its own progress bar, and error messages would end up in their lines
        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()
        with ignored_named(config):
            self.load(config, dtype, weights_dtype)
        self.adapt(self.transformer)
        if not self.transformer.config.get("guidance_embeds", True):  # as of FLUX.1-schnell
            self.embedded_guidance_key = None
        encoders = [part for name, part in self.pipeline.components.items() if name.startswith("text_encoder")]
        self.text_encoders = [encoder for encoder in encoders if encoder is not None]

    def load(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        """Set `pipeline`, `transformer`, `vae` and `dtype`."""
        path, self.dtype = str(base_folder(config)), dtype
        index = model_index(path)
        given = absent_components(index) | self.components(path)
        stored = config.lora_rank == 0
        self.transformer = load_transformer(self.transformer_class, path, "transformer", weights_dtype, stored=stored)
        for name in component_names(index):
            if name.startswith("text_encoder"):
                parts = path, name, index[name][1], dtype
                given[name] = kept(("text encoder", *parts), partial(load_text_encoder, *parts, f"{config:path}"))
        given |= {"transformer": self.transformer, "dtype": {"default": dtype, "vae": self.vae_dtype or dtype}}
        self.pipeline = self.stock_pipeline().from_pretrained(path, trust_remote_code=False, **given)
        self.vae = self.pipeline.vae
        check_parts(path, self.pipeline.components, self.input_channels)

    @staticmethod
    def adapt(transformer: Any) -> None:
        """Replace modules of diffusers' transformer by the family's own, before its first use."""

    def components(self, path: str) -> dict[str, Any]:
        """Components that the family loads itself rather than diffusers, by their names in the pipeline."""
        return {}

    def blocks(self) -> list[nn.Module]:
        """The repeated blocks: the units of sharding, compilation and checkpointing."""
        return list(chain(*(getattr(self.transformer, name) for name in self.block_lists)))

    def prepare_compiling(self) -> None:
        """Before the blocks are compiled, replace modules of the transformer that torch.compile handles poorly."""
        use_sigmoid(self.transformer)

    def heads(self) -> tuple[int, int]:
        """Number of attention heads, and the dimension of each."""
        c = self.transformer.config
        return c.num_attention_heads, c.attention_head_dim

    def check_length(self, data: FlowDataConfig) -> None:
        """Check `data.max_prompt_length` before any prompt is encoded: warn, or raise ValueError."""

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """The tokenizer of the text encoder with the longest context, each text's tokens, and its maximum length."""
        return self.pipeline.tokenizer, self.pipeline.tokenizer(texts)["input_ids"], max_length

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        """Text embeddings of each prompt, on the CPU: `prompt_embeds` [L, D], and further tensors of some families.

        Padding that attention would have to mask is removed; padding that the model attended to in its training stays.
        """
        raise AssertionError

    def encode_instruction(self, instruction: Instruction, device: torch.device, max_length: int) -> Embeds:
        """`encode` for families with an `image_column`: the embeddings of a text and its image.

        Raises ValueError for an image that cannot be read.
        """
        raise AssertionError

    def most_tokens(self, max_length: int, height: int, width: int) -> int:
        """Maximum number of tokens in `prompt_embeds` for a prompt of at most `max_length` tokens."""
        return max_length

    def collate(self, embeds: list[Embeds], length: int, padded: bool) -> Embeds:
        """Stack embeddings to [N, length, D]; `padded`: a prompt on some rank is shorter than `length`."""
        return {name: torch.stack([e[name] for e in embeds]) for name in embeds[0]}

    def schedule(self, num_inference_steps: int, height: int, width: int, frames: int = 1) -> tuple[Tensor, Tensor]:
        """sigmas [N + 1] and timesteps [N], float32, of the model folder's own scheduler.

        They are those of diffusers' pipelines with `calculate_shift`: evenly spaced levels 1 .. 1/N, shifted by the
        number of tokens if the folder has `use_dynamic_shifting`.
        """
        scheduler, tokens = self.pipeline.scheduler, self.shifting_tokens(height, width, frames)
        even = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        scheduler.set_timesteps(sigmas=even, mu=self.dynamic_shift(tokens, num_inference_steps))
        return scheduler.sigmas.float().cpu(), scheduler.timesteps.float().cpu()

    def shifting_tokens(self, height: int, width: int, frames: int) -> int:
        """Number of tokens by which the schedule is shifted."""
        return self.tokens(height, width)

    def dynamic_shift(self, tokens: int, num_inference_steps: int) -> float:
        """diffusers' `mu` for an image of `tokens` tokens."""
        c = self.pipeline.scheduler.config
        return calculate_shift(tokens, c.base_image_seq_len, c.max_image_seq_len, c.base_shift, c.max_shift)

    def tokens(self, height: int, width: int) -> int:
        """Number of image tokens in the transformer; each is a square of latents."""
        *_, rows, columns = self.latent_shape(height, width)
        return (rows // self.patch) * (columns // self.patch)

    @property
    def patch(self) -> int:
        """Side of an image token, in latents."""
        return self.transformer.config.patch_size

    def prepare_sharing(self, size: int) -> None:
        """Before `size` ranks share a sample's tokens, replace modules of the transformer that do not support this.

        Raises ValueError for a `size` that the family does not support.
        """

    def context_plan(self) -> dict[str, Any]:
        """diffusers' context-parallel plan: the layers whose inputs are split, and those whose outputs are gathered."""
        return self.transformer_class._cp_plan

    def split_tokens(self, height: int, width: int, frames: int, max_length: int) -> dict[str, int]:
        """Lengths of the sequences that the plan splits in a sample, except text, by a description for messages."""
        return {f"an image of {height} x {width}": self.tokens(height, width)}

    def shift(self, num_inference_steps: int, height: int, width: int, frames: int = 1) -> float:
        """The scheduler's shift s; it maps a noise level t to s t / (1 + (s - 1) t), without `shift_terminal`."""
        c = self.pipeline.scheduler.config
        if not c.use_dynamic_shifting:
            return float(c.shift)
        mu = self.dynamic_shift(self.shifting_tokens(height, width, frames), num_inference_steps)
        return math.exp(mu) if c.time_shift_type == "exponential" else mu

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Shape of the latents of one sample, an image if it has one frame.

        Raises ValueError for a size that the model does not support.
        """
        raise AssertionError

    def velocity(self, latents: Tensor, timesteps: Tensor, embeds: Embeds, height: int, width: int) -> Tensor:
        """One forward pass: latents and embeds [N, ...], timesteps [N] in 0..1000 -> velocities [N, ...].

        With an `embedded_guidance_key`, `embeds` also has `guidance` [N] float32, the scale.
        """
        raise AssertionError

    def guidance(self, sampler: Sampler, timesteps: Tensor) -> Any:
        """Classifier-free guidance scale: one number, or a tensor [N, 1, ...] with that of each of `timesteps` [N]."""
        return sampler.guidance

    def check_window(self, timesteps: Tensor, config: FlowModelConfig) -> None:
        """Warn if a part in `config.target_components` takes none of the steps at `timesteps` [S]."""

    def computed_as_sampled(self) -> AbstractContextManager[None]:
        """A context in which every row is computed at the batch size of the whole pass, as in sampling."""
        return nullcontext()

    def guide(self, negative: Tensor, positive: Tensor, scale: float) -> Tensor:
        """Combine two velocities by classifier-free guidance, in float32."""
        return negative + scale * (positive - negative)

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        """Decode normalised latents to images [N, 3, H, W], or videos [N, F, 3, H, W], float32 in 0..1.

        This implementation is for an AutoencoderKL with latents [N, C, h, w].
        """
        c = self.vae.config
        unscaled = (latents / c.scaling_factor + c.shift_factor).to(self.vae.dtype)
        return to_pixels(self.vae.decode(unscaled, return_dict=False)[0])

    def decode_frames(self, unscaled: Tensor) -> Tensor:
        """`decode` by a video VAE, for latents [N, C, f, h, w] with their own mean and standard deviation."""
        pixels = self.vae.decode(unscaled.to(self.vae.dtype), return_dict=False)[0]
        frames = to_pixels(pixels.transpose(1, 2))
        return frames if frames.shape[1] > 1 else frames[:, 0]

    def latent_statistics(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [C, 1, 1, 1] of a video VAE's latents."""
        c = self.vae.config
        mean, std = torch.tensor([c.latents_mean, c.latents_std], device=device)
        return mean.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)

    def frame_latents(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Encode images [N, 3, H, W] by a video VAE, to latents [N, C, 1, h, w] normalised to mean 0 and std 1."""
        mean, std = self.latent_statistics(images.device)
        return (self.posterior(images[:, :, None], generator) - mean) / std

    def posterior(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Float32 latents of images in 0..1: a draw from the VAE's posterior, or its mode without a generator."""
        posterior = self.vae.encode((images * 2 - 1).to(self.vae.dtype)).latent_dist
        latents = posterior.mode() if generator is None else posterior.sample(generator)
        return latents.float()

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Encode images [N, 3, H, W] in 0..1 to normalised float32 latents [N, ...]: the inverse of `decode`."""
        c = self.vae.config
        return (self.posterior(images, generator) - c.shift_factor) * c.scaling_factor

    def embeds_like(self, length: int, height: int, width: int, frames: int = 1) -> Embeds:
        """Uninitialised embeddings shaped like those of a prompt of `length` tokens, to count FLOPs with.

        This implementation has T5's `prompt_embeds` and CLIP's `pooled`.
        """
        c = self.transformer.config
        shapes = {"prompt_embeds": (length, c.joint_attention_dim), "pooled": (c.pooled_projection_dim,)}
        return {name: torch.empty(shape, dtype=self.dtype) for name, shape in shapes.items()}

    def flops(self, height: int, width: int, text_length: int, frames: int = 1) -> int:
        """Floating-point operations of one forward pass of one sample."""
        kind, config = self.transformer_class, self.transformer.config

        def inputs() -> dict[str, Any]:
            one = self.embeds_like(text_length, height, width, frames)
            embeds = self.collate([one], len(one["prompt_embeds"]), padded=False)
            if self.embedded_guidance_key is not None:
                embeds["guidance"] = torch.empty(1)
            latents = torch.empty(1, *self.latent_shape(height, width, frames))
            return {"latents": latents, "timesteps": torch.empty(1), "embeds": embeds, "height": height, "width": width}

        def forward_pass() -> nn.Module:
            transformer = kind.from_config(config).to(self.dtype)
            self.adapt(transformer)
            return _ForwardPass(self, transformer)

        return forward_flops(forward_pass, inputs, f"{type(self)} {kind} {config}")


class _ForwardPass(nn.Module):
    """A family's `velocity` as a module, computed by the given transformer."""

    def __init__(self, model: FlowModel, transformer: nn.Module) -> None:
        super().__init__()
        self.model, self.transformer = copy.copy(model), transformer
        self.model.transformer = transformer

    def forward(self, **inputs: Any) -> Tensor:
        return self.model.velocity(**inputs)


class PackedModel(FlowModel):
    """A model of packed latents [N, (H/u)(W/u), C]: a token is 2 x 2 VAE latents, u pixels wide."""

    input_channels = (4, 0)

    def tokens(self, height: int, width: int) -> int:
        rows, columns = self.grid(height, width)
        return rows * columns

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        return (self.tokens(height, width), self.transformer.config.in_channels)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of image tokens; raises ValueError for a size that the model does not support."""
        # the pipelines' _pack_latents always packs 2 x 2, whatever patch_size is
        unit = self.pipeline.vae_scale_factor * 2
        check_size(height, width, unit)
        return height // unit, width // unit

    def pack(self, latents: Tensor) -> Tensor:
        """Pack VAE latents [N, C, h, w] or [N, C, 1, h, w]."""
        n, channels, *_, h, w = latents.shape
        return self.pipeline._pack_latents(latents, n, channels, h, w)

    def unpack(self, latents: Tensor, height: int, width: int) -> Tensor:
        """The inverse of `pack`."""
        return self.pipeline._unpack_latents(latents, height, width, self.pipeline.vae_scale_factor)


def to_pixels(decoded: Tensor) -> Tensor:
    """Map a VAE's output in -1..1 to float32 in 0..1."""
    return (decoded.float() / 2 + 0.5).clamp(0, 1)


def check_size(height: int, width: int, unit: int, limit: int | None = None) -> None:
    """Raise ValueError if a side is not a multiple of `unit` pixels, or longer than `limit`."""
    for name, size in (("height", height), ("width", width)):
        if size % unit:
            near = near_multiples(size, unit)
            raise ValueError(f"rollout.{name}: {size} should be a multiple of {unit}, e.g. {near}")
        if limit is not None and size > limit:
            raise ValueError(f"rollout.{name}: {size} is more than the model's {limit} pixels")


def latent_frames(frames: int, step: int) -> int:
    """Number of latent frames of a causal VAE: one for the first frame, and one for every `step` frames after it.

    Raises ValueError if frames are left over.
    """
    count = max(frames - 1, 0) // step + 1
    below = (count - 1) * step + 1
    if frames != below:
        raise ValueError(
            f"rollout.num_frames: {frames} should be 1 more than a multiple of {step}, e.g. {below} or {below + step}"
        )
    return count
