"""Model families with random weights: real architectures, built from their configurations without any download.

In a configuration, set `model.family: benchmarks/shapes.py:random_sd3` (or `random_qwen_image`) and
`model.path: <shape>`, where a shape is one of SHAPES, optionally with a number of blocks, such as qwen_image/4.
Weights are created on the device, in the dtype that they are kept in, and no layer is zero. Prompt embeddings are
random too, so no encoder is needed: for Qwen-Image `text_length` tokens for the longest prompt and a quarter of that
for the shortest, for SD3 77 + data.max_prompt_length tokens. For the large models the reward takes as much CPU time as
OCR.
"""

import hashlib
import inspect
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn

from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.family import Embeds
from phalanx.zoo.families import qwen_image, sd3


@dataclass(frozen=True)
class Shape:
    """Constructor arguments of a transformer and its VAE. text_length: tokens of the longest prompt; None: by the
    family's rule. reward_s: CPU seconds of the reward per image.
    """

    transformer: dict[str, Any]
    vae: dict[str, Any]
    text_length: int | None = None
    reward_s: float = 0.005
    scheduler: dict[str, Any] = field(default_factory=dict)


# huggingface.co/stabilityai/stable-diffusion-3.5-medium: the config.json of transformer and vae
_SD3_VAE = {
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_FOUR_BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
# huggingface.co/Qwen/Qwen-Image: scheduler_config.json
_QWEN_SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

SHAPES: dict[str, Shape] = {
    # 2.2 billion parameters, and its VAE
    "sd35_medium": Shape(
        transformer={
            "sample_size": 128,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "num_attention_heads": 24,
            "attention_head_dim": 64,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
        vae={**_FOUR_BLOCKS, **_SD3_VAE, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2},
        reward_s=0.25,
        scheduler={"shift": 3.0},
    ),
    # 2.6 million parameters: the model of cpu_reference.yaml
    "sd3_cpu": Shape(
        transformer={
            "sample_size": 32,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 32,
            "joint_attention_dim": 256,
            "caption_projection_dim": 128,
            "pooled_projection_dim": 128,
            "pos_embed_max_size": 64,
            "dual_attention_layers": (0, 1),
            "qk_norm": "rms_norm",
        },
        vae={**_FOUR_BLOCKS, **_SD3_VAE, "block_out_channels": (32,) * 4, "layers_per_block": 1, "norm_num_groups": 8},
        scheduler={"shift": 3.0},
    ),
    "tiny_sd3": Shape(
        transformer={
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 16,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        vae={
            **_FOUR_BLOCKS,
            **_SD3_VAE,
            "latent_channels": 4,
            "block_out_channels": (8,) * 4,
            "layers_per_block": 1,
            "norm_num_groups": 4,
        },
        scheduler={"shift": 3.0},
    ),
    # 20.4 billion parameters: the defaults of diffusers' classes are those of Qwen/Qwen-Image
    "qwen_image": Shape(transformer={}, vae={}, text_length=64, reward_s=0.25, scheduler=_QWEN_SCHEDULER),
    "tiny_qwen_image": Shape(
        transformer={
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        vae={
            "base_dim": 8,
            "z_dim": 4,
            "num_res_blocks": 1,
            "latents_mean": [-0.2, 0.1, 0.3, -0.1],
            "latents_std": [1.5, 0.8, 1.2, 2.0],
        },
        text_length=16,
        scheduler=_QWEN_SCHEDULER,
    ),
}


class RandomSD3(sd3.Model):
    """Stable Diffusion 3 with random weights."""

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape_of(config), dtype
        shape = self.shape
        self.transformer = random_weights(SD3Transformer2DModel, shape.transformer, weights_dtype)
        self.vae = random_weights(AutoencoderKL, shape.vae, dtype)
        self.text_encoders = []
        self.pipeline = StableDiffusion3Pipeline(
            transformer=self.transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(**shape.scheduler),
            vae=self.vae,
            **{f"{part}{i}": None for part in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")},
        )
        self.adapt(self.transformer)

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """No tokens: embeddings are random, and of any text."""
        return None, [[] for _ in texts], max_length

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        c = self.transformer.config
        length = 77 + max_length if self.shape.text_length is None else self.shape.text_length
        sizes = {"prompt_embeds": (length, c.joint_attention_dim), "pooled": (c.pooled_projection_dim,)}
        return [random_embeds(text, sizes, self.dtype) for text in texts]


class RandomQwenImage(qwen_image.Model):
    """Qwen-Image with random weights."""

    def __init__(self, config: FlowModelConfig, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape_of(config), dtype
        shape = self.shape
        self.transformer = random_weights(QwenImageTransformer2DModel, shape.transformer, weights_dtype)
        self.vae = random_weights(AutoencoderKLQwenImage, shape.vae, dtype)
        self.text_encoders = []
        self.pipeline = QwenImagePipeline(
            transformer=self.transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(**shape.scheduler),
            vae=self.vae,
            text_encoder=None,
            tokenizer=None,
        )

    def text_tokens(self, texts: list[str], max_length: int) -> tuple[Any, list[list[int]], int]:
        """No tokens: embeddings are random, and of any text."""
        return None, [[] for _ in texts], max_length

    def encode(self, texts: list[str], device: torch.device, max_length: int) -> list[Embeds]:
        width, found = self.transformer.config.joint_attention_dim, []
        for text in texts:
            length = min(self.text_length(text), max_length)
            found.append(random_embeds(text, {"prompt_embeds": (length, width)}, self.dtype))
        return found

    def text_length(self, text: str) -> int:
        """The number of tokens of a prompt: at least a quarter of the longest."""
        longest = self.shape.text_length
        assert longest is not None
        shortest = longest // 4
        return shortest + seed_of(text) % (longest - shortest + 1)


# the values of model.family: `benchmarks/shapes.py:random_sd3`
random_sd3 = SimpleNamespace(Model=RandomSD3)
random_qwen_image = SimpleNamespace(Model=RandomQwenImage)


def shape_of(config: FlowModelConfig) -> Shape:
    """The shape that `config.path` names; raises ValueError for an unknown one."""
    name, _, blocks = config.path.partition("/")
    if name not in SHAPES or (blocks and not blocks.isdecimal()):
        raise ValueError(f"model.path: {config.path!r} is not in benchmarks/shapes.py; known: {', '.join(SHAPES)}")
    return with_blocks(SHAPES[name], int(blocks)) if blocks else SHAPES[name]


def blueprint(folder: Path, path: str) -> Path:
    """Write the configuration files of a shape, from which `--plan` can be made, to a folder."""
    shape, qwen = shape_of(FlowModelConfig(path=path)), "qwen" in path
    with init_empty_weights():
        parts = {
            "transformer": (QwenImageTransformer2DModel if qwen else SD3Transformer2DModel)(**shape.transformer),
            "vae": (AutoencoderKLQwenImage if qwen else AutoencoderKL)(**shape.vae),
            "scheduler": FlowMatchEulerDiscreteScheduler(**shape.scheduler),
        }
    pipeline = QwenImagePipeline if qwen else StableDiffusion3Pipeline
    index: dict[str, Any] = {"_class_name": pipeline.__name__}
    for name in inspect.signature(pipeline.__init__).parameters:
        if name.startswith(("text_encoder", "tokenizer")):
            index[name] = [None, None]
    for name, part in parts.items():
        part.save_config(folder / name)
        index[name] = ["diffusers", type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def with_blocks(shape: Shape, blocks: int) -> Shape:
    """The shape with another number of blocks."""
    transformer = shape.transformer | {"num_layers": blocks}
    if "dual_attention_layers" in transformer:
        transformer["dual_attention_layers"] = tuple(i for i in transformer["dual_attention_layers"] if i < blocks)
    return replace(shape, transformer=transformer)


def random_weights(kind: type[nn.Module], arguments: dict[str, Any], dtype: torch.dtype) -> Any:
    """A module of `dtype` on this rank's device, the same on every rank: all N(0, 0.02), the gains of norms about 1.

    Parameters are made on the meta device first: never in another dtype, never on another device.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with init_empty_weights(include_buffers=False):
        module = kind(**arguments)
    generator = torch.Generator(device).manual_seed(0)
    for part in module.modules():
        for name, p in part.named_parameters(recurse=False):
            value = torch.empty(p.shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
            if p.dim() == 1 and name == "weight":  # a norm's gain
                value += 1
            setattr(part, name, nn.Parameter(value, requires_grad=False))
    return module.to(device, dtype).eval()


def random_embeds(text: str, sizes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Embeds:
    """Standard normal embeddings of `sizes`, a function of the text."""
    generator = torch.Generator().manual_seed(seed_of(text))
    found: dict[str, Tensor] = {}
    for name, size in sizes.items():
        found[name] = torch.randn(size, generator=generator).to(dtype)
    return found


def seed_of(text: str) -> int:
    """A seed of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def random_reward(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]], seconds: float = 0.0) -> Tensor:
    """Rewards [B] in 0..1 that are a function of the images, after `seconds` of CPU time of this thread per image.

    Images from random weights can all be alike, and equal rewards would leave nothing to train on.
    """
    end = time.thread_time() + seconds * len(images)
    matrix = torch.ones(128, 128)
    while time.thread_time() < end:
        torch.mm(matrix, matrix)  # releases the interpreter's lock, as OCR does
    generator = torch.Generator().manual_seed(hash(images.double().sum().item()))
    return torch.rand(len(images), generator=generator)
