"""A frozen CLIP on the rank's device: normalised embeddings of image tensors and of prompts."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.engines.loading import check_weights, loading

_BICUBIC = 3  # PIL's constant, which preprocessor_config.json contains
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
_VALUES = ("size", "crop_size", "resample", "rescale_factor", "image_mean", "image_std")


@dataclass(frozen=True)
class Pixels:
    """CLIP's image preprocessing for a batch of tensors on any device.

    It has the steps and values of transformers' CLIPImageProcessor (8-bit bicubic resize, centre crop, normalisation),
    which processes single images on the CPU; the two agree within two of 255 levels (tested). With antialias=False,
    resize and crop are those of torchvision for tensors, without smoothing and rounding of levels.
    """

    shortest_edge: int | None  # None: `size` is the exact (height, width)
    size: tuple[int, int]
    crop: tuple[int, int]
    mean: Tensor  # [3, 1, 1]
    std: Tensor  # [3, 1, 1]
    antialias: bool = True

    def __call__(self, images: Tensor) -> Tensor:
        """Resize, crop and normalise images [B, 3, H, W] in 0..1 to [B, 3, *crop]."""
        height, width = images.shape[2:]
        size = self.size
        if self.shortest_edge is not None:
            long = int(self.shortest_edge * max(height, width) / min(height, width))
            size = (self.shortest_edge, long) if height <= width else (long, self.shortest_edge)
        levels = resize(images, size) if self.antialias else F.interpolate(images * 255, size=size, mode="bicubic")
        halves = [(edge - crop) / 2 for edge, crop in zip(size, self.crop, strict=True)]
        top, left = (int(half) if self.antialias else round(half) for half in halves)
        levels = levels[:, :, top : top + self.crop[0], left : left + self.crop[1]]
        return (levels / 255 - self.mean) / self.std


class Clip:
    """A CLIPModel in float32; with text=False, without its text tower."""

    def __init__(
        self,
        model: str,
        device: str,
        *,
        processor: str | None = None,
        name: str = "model",
        text: bool = True,
        antialias: bool = True,
    ) -> None:
        """Load from folders or hub ids. `processor`: that of tokenizer and preprocessing, None: `model`; `name`: the
        user's name for `model` in messages; `antialias`: see Pixels.
        """
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        clip = load_model(CLIPModel, model, name, "a CLIP model", use_safetensors=True)
        self._device = torch.device(device)
        if not text:
            del clip.text_model, clip.text_projection
        self._clip: Any = clip.to(device)
        self.logit_scale: Tensor = clip.logit_scale.exp()
        self.dim: int = clip.config.projection_dim
        self.edge: int = clip.config.vision_config.image_size  # pixels per side of its input
        if processor is not None:
            name, model = "processor", processor
        pixels = pixels_of(load_part(AutoImageProcessor, model, name).to_dict(), self._device)
        self._pixels = replace(pixels, antialias=antialias)
        if not text:
            return
        self._tokenizer = load_part(AutoTokenizer, model, name)
        config = clip.config.text_config
        if len(self._tokenizer) != config.vocab_size:
            # transformers silently makes an empty tokenizer if the folder has none
            raise ValueError(
                f"{name}={model!r} has a tokenizer of {len(self._tokenizer)} tokens, but the model has "
                f"{config.vocab_size}; give the processor that belongs to the model"
            )
        self._max_tokens: int = config.max_position_embeddings

    def images(self, images: Tensor) -> Tensor:
        """Embed images [B, 3, H, W] in 0..1 as unit vectors [B, dim], differentiable with respect to the images."""
        pixels = self._pixels(images.to(self._device))
        return F.normalize(self._clip.get_image_features(pixels).pooler_output, dim=-1)

    @torch.no_grad()
    def prompts(self, prompts: list[str]) -> Tensor:
        """Embed B prompts, truncated to CLIP's 77 tokens, as unit vectors [B, dim]; equal prompts are encoded once."""
        distinct = list(dict.fromkeys(prompts))
        tokens = self._tokenizer(
            distinct, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._device)
        features = self._clip.get_text_features(tokens.input_ids, tokens.attention_mask).pooler_output
        rows = torch.tensor([distinct.index(p) for p in prompts], device=self._device)
        return F.normalize(features, dim=-1)[rows]


def pixels_of(config: dict[str, Any], device: torch.device) -> Pixels:
    """The preprocessing that a preprocessor_config.json describes. Raises ValueError if it is not CLIP's."""
    is_clips = all(config.get(key) for key in (*_STEPS, *_VALUES))  # processors of other models lack some
    if is_clips:
        edge = config["size"].get("shortest_edge")
        size = (edge, edge) if edge is not None else (config["size"].get("height"), config["size"].get("width"))
        crop = (config["crop_size"].get("height"), config["crop_size"].get("width"))
        is_clips = None not in (*size, *crop) and crop[0] <= size[0] and crop[1] <= size[1]
    if not is_clips or config["resample"] != _BICUBIC or not math.isclose(config["rescale_factor"], 1 / 255):
        raise ValueError("the image processor is not CLIP's: bicubic resize, centre crop, rescaling, normalisation")
    mean, std = (torch.tensor(config[key], device=device).view(3, 1, 1) for key in ("image_mean", "image_std"))
    return Pixels(edge, size, crop, mean, std)


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize images [B, 3, H, W] in 0..1 to [B, 3, *size] in integer levels 0..255, like PIL's 8-bit bicubic resize.

    The gradient is that of a resize without rounding.
    """
    levels = F.interpolate(_Rounded.apply(images * 255).clamp(0, 255), size=size, mode="bicubic", antialias=True)
    return _Rounded.apply(levels).clamp(0, 255)


class _Rounded(torch.autograd.Function):
    """Rounds values; the gradient passes straight through."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def read_weights(file: Path, what: str) -> dict[str, Tensor]:
    """The weights of a .safetensors file. `what` names it in messages."""
    from safetensors.torch import load_file

    with loading(f"{what} is not a safetensors file"):
        return load_file(file)


def load_whole(module: nn.Module, state: dict[str, Tensor], other: str, expected: str) -> Any:
    """The module with exactly these weights in its own dtype, frozen. Raises ValueError, which begins with `other` and
    ends with `expected`, if they are not its own.
    """
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{other} ({' '.join(str(error).split())}); {expected}") from error
    return module.requires_grad_(False).eval()


def load_part(cls: Any, source: str, name: str, holds: str = "a CLIP model", **options: Any) -> Any:
    """`cls.from_pretrained` of a folder or hub id, which should contain what `holds` describes. Raises ValueError, with
    one line that names the kwarg `name`, for a path that is not a folder, and if it does not load.
    """
    path = Path(source).expanduser()
    if source.startswith(("/", ".", "~")) or path.exists():
        if not path.is_dir():
            raise ValueError(f"{name}={source!r} is not a folder; give a folder with {holds}, or a hub id")
        source = str(path)
    with loading(f"{name}={source!r} does not load as {cls.__name__}"):
        return cls.from_pretrained(source, trust_remote_code=False, **options)


def openai_colours(device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [3, 1, 1] of the images that CLIP was trained with; other models use them, too."""
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    mean, std = torch.tensor([OPENAI_CLIP_MEAN, OPENAI_CLIP_STD], device=device).view(2, 3, 1, 1)
    return mean, std


def load_model(cls: Any, source: str, name: str, what: str, **options: Any) -> Any:
    """A frozen model in float32. Raises ValueError, that it is not `what`, if the files lack some of its weights, which
    transformers would initialise at random.
    """
    checked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = load_part(cls, source, name, what, dtype=torch.float32, **checked, **options)
    check_weights(info, f"{name}={source!r} is not {what}")
    return model.requires_grad_(False).eval()
