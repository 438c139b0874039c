"""Reward: LAION's aesthetic predictor V2 (github.com/christophschuhmann/improved-aesthetic-predictor), about 1..10.

Five linear layers, without non-linearities between them, on CLIP ViT-L/14's unit embedding of an image. DDPO and
flow_grpo use the score unscaled; weight 0.1 brings it near 0..1.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from phalanx.rewards.base import DifferentiableReward
from phalanx.zoo.rewards.image._clip import Clip, load_whole, read_weights

# Positions in the published nn.Sequential, which has a dropout at 1, 3 and 5.
_WIDTHS = {"0": 1024, "2": 128, "4": 64, "6": 16, "7": 1}
_KEYS = ", ".join(f"layers.{k}.weight and .bias" for k in _WIDTHS)
_CONVERT = (
    "python -c \"import torch, safetensors.torch as s; d = torch.load('{path}', weights_only=True); "
    "s.save_file({{k: v.clone() for k, v in d.get('state_dict', d).items()}}, '{stem}.safetensors')\""
)


class Aesthetic(DifferentiableReward):
    """`predictor`: the layers as a .safetensors file (or the folder of one); `clip_model`: folder or hub id."""

    def __init__(self, predictor: str, clip_model: str = "openai/clip-vit-large-patch14", device: str = "cpu") -> None:
        where = f"predictor={predictor!r}"
        layers = linear_layers(read_published(predictor, where), where)
        self._clip = Clip(clip_model, device, name="clip_model", text=False)
        width = layers[0].in_features
        if width != self._clip.dim:
            raise ValueError(
                f"predictor={predictor!r} takes {width} features, and clip_model={clip_model!r} gives "
                f"{self._clip.dim}; expected the CLIP that it was trained on, openai/clip-vit-large-patch14"
            )
        self._layers = layers.to(device)

    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B], about 1..10, of images [B, 3, H, W] in 0..1."""
        scores: Tensor = self._layers(self._clip.images(images))  # [B, 1]
        return scores.squeeze(-1)


def linear_layers(state: dict[str, Tensor], where: str) -> nn.Sequential:
    """The layers with weights `layers.0.weight`, `layers.0.bias`, ..., `layers.7.bias`. `where` names their kwarg."""
    first = state.get("layers.0.weight")
    if first is None or first.ndim != 2:
        raise ValueError(f"{where} has no matrix layers.0.weight; expected {_KEYS}")
    widths = [first.shape[1], *_WIDTHS.values()]
    layers = nn.Sequential(OrderedDict(zip(_WIDTHS, map(nn.Linear, widths, widths[1:]), strict=True)))
    state = {name.removeprefix("layers."): value for name, value in state.items()}
    return load_whole(layers, state, f"{where} has other layers", f"expected {_KEYS}")


def read_published(path: str, where: str) -> dict[str, Tensor]:
    """The weights of a .safetensors file, or of the only such file in a folder. `where` names the kwarg of `path`."""
    file = Path(path).expanduser()
    if file.is_dir():
        files = sorted(file.glob("*.safetensors"))
        if len(files) != 1:
            raise ValueError(f"{where} is a folder with {len(files)} .safetensors files; expected one")
        file = files[0]
    if file.suffix in (".pth", ".pt", ".bin", ".ckpt"):
        command = _CONVERT.format(path=file, stem=file.with_suffix(""))
        raise ValueError(f"{where} is a pickle, which can run code; convert it once: {command}")
    if not file.is_file():
        raise ValueError(f"{where} does not exist; expected a .safetensors file or its folder")
    return read_weights(file, where)
