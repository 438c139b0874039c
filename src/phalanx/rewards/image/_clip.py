"""A frozen CLIP on the rank's device: normalised embeddings of image tensors and of prompts."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.engines.loading import check_weights, loading
from phalanx.media.pictures import to_uint8

_BICUBIC = 3  # PIL's number, as preprocessor_config.json gives it
_STEPS = ("do_resize", "do_center_crop", "do_rescale", "do_normalize")
_VALUES = ("resample", "rescale_factor", "image_mean", "image_std")


@dataclass(frozen=True)
class Pixels:
    """CLIP's image preprocessing, for a batch of tensors on any device.

    The steps and values of transformers' CLIPImageProcessor (8-bit bicubic resize, centre crop, normalisation), which
    works image by image and leaves the device; the two agree within two of 255 levels (tested).
    """

    shortest_edge: int | None  # None: `size` is the exact (height, width)
    size: tuple[int, int]
    crop: tuple[int, int]
    mean: Tensor  # [3, 1, 1]
    std: Tensor  # [3, 1, 1]

    def __call__(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in 0..1 -> [B, 3, *crop], normalised."""
        height, width = images.shape[2:]
        size = self.size
        if self.shortest_edge is not None:
            long = int(self.shortest_edge * max(height, width) / min(height, width))
            size = (self.shortest_edge, long) if height <= width else (long, self.shortest_edge)
        levels = to_uint8(images).float()
        levels = F.interpolate(levels, size=size, mode="bicubic", antialias=True).round().clamp(0, 255)
        top, left = (size[0] - self.crop[0]) // 2, (size[1] - self.crop[1]) // 2
        levels = levels[:, :, top : top + self.crop[0], left : left + self.crop[1]]
        return (levels / 255 - self.mean) / self.std


class Clip:
    """A CLIPModel in float32; `text=False` leaves its text tower out."""

    def __init__(self, model: str, processor: str, device: str, *, names: tuple[str, str], text: bool = True) -> None:
        """Load from folders or hub ids; `names` are the kwargs that gave `model` and `processor`, for messages."""
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        source = folder_or_hub(model, names[0])
        told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        clip, info = load_part(CLIPModel, source, names[0], use_safetensors=True, dtype=torch.float32, **told)
        check_weights(info, f"{names[0]}={model!r} is not a CLIP model")
        clip.requires_grad_(False).eval()
        self._device = torch.device(device)
        self._vision: nn.Module = clip.vision_model.to(device)
        self._vision_projection: nn.Module = clip.visual_projection.to(device)
        self.logit_scale: Tensor = clip.logit_scale.exp().to(device)
        self.dim: int = clip.config.projection_dim
        self.edge: int = clip.config.vision_config.image_size  # pixels, of the square that it sees
        source = folder_or_hub(processor, names[1])
        self._pixels = pixels_of(load_part(AutoImageProcessor, source, names[1]).to_dict(), self._device)
        if not text:
            return
        self._tokenizer = load_part(AutoTokenizer, source, names[1])
        config = clip.config.text_config
        if len(self._tokenizer) != config.vocab_size:
            # transformers makes an empty tokenizer, silently, of a folder without one
            raise ValueError(
                f"{names[1]}={processor!r} has a tokenizer of {len(self._tokenizer)} tokens, and the model knows "
                f"{config.vocab_size}; give the processor that belongs to the model"
            )
        self._max_tokens: int = config.max_position_embeddings
        self._text: nn.Module = clip.text_model.to(device)
        self._text_projection: nn.Module = clip.text_projection.to(device)

    @torch.no_grad()
    def images(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in 0..1 -> unit vectors [B, dim]."""
        pixels = self._pixels(images.to(self._device))
        return F.normalize(self._vision_projection(self._vision(pixels).pooler_output), dim=-1)

    @torch.no_grad()
    def prompts(self, prompts: list[str]) -> Tensor:
        """B prompts, cut to CLIP's 77 tokens -> unit vectors [B, dim]; equal prompts are encoded once."""
        distinct = list(dict.fromkeys(prompts))
        tokens = self._tokenizer(
            distinct, padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._device)
        hidden = self._text(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).pooler_output
        rows = torch.tensor([distinct.index(p) for p in prompts], device=self._device)
        return F.normalize(self._text_projection(hidden), dim=-1)[rows]


def pixels_of(config: dict[str, Any], device: torch.device) -> Pixels:
    """The preprocessing that a preprocessor_config.json describes; ValueError for steps that CLIP does not have."""
    edge = _sizes(config, "size").get("shortest_edge")
    size = _height_width(config, "size") if edge is None else (edge, edge)
    crop = _height_width(config, "crop_size")
    steps = all(config.get(key) for key in (*_STEPS, *_VALUES))  # processors of other models lack some
    steps = steps and config["resample"] == _BICUBIC and math.isclose(config["rescale_factor"], 1 / 255)
    if not steps or size is None or crop is None or crop[0] > size[0] or crop[1] > size[1]:
        raise ValueError("the image processor is not CLIP's: bicubic resize, centre crop, rescaling, normalisation")
    return Pixels(
        shortest_edge=edge,
        size=size,
        crop=crop,
        mean=torch.tensor(config["image_mean"], device=device).view(3, 1, 1),
        std=torch.tensor(config["image_std"], device=device).view(3, 1, 1),
    )


def _sizes(config: dict[str, Any], key: str) -> dict[str, int | None]:
    """The lengths in pixels that `size` or `crop_size` gives by their names; none where the processor has none."""
    return dict(config.get(key) or {})


def _height_width(config: dict[str, Any], key: str) -> tuple[int, int] | None:
    """Both of them in pixels; None where `size` or `crop_size` does not give both."""
    height, width = map(_sizes(config, key).get, ("height", "width"))
    return None if height is None or width is None else (height, width)


def folder_or_hub(source: str, name: str, holds: str = "a CLIP model") -> str:
    """A folder, checked, or a hub id as it is; `name` is the kwarg that gave it, for messages."""
    path = Path(source).expanduser()
    if source.startswith(("/", ".", "~")) or path.exists():
        if not path.is_dir():
            raise ValueError(f"{name}={source!r} is not a folder; give a folder with {holds}, or a hub id")
        return str(path)
    return source


def load_part(cls: Any, source: str, name: str, **options: Any) -> Any:
    """`cls.from_pretrained`, whose errors become one ValueError that names the kwarg `name`."""
    with loading(f"{name}={source!r} does not load as {cls.__name__}"):
        return cls.from_pretrained(source, **options)
