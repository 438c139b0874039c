"""Reward: VBench's subject consistency (arXiv 2311.17982): the similarity of a video's frames by DINO, in 0..1.

DINO (arXiv 2104.14294) sees whole frames, resized so that the shorter side has the size of its training images.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, ViTModel

from phalanx.zoo.rewards.image._clip import load_model, load_part
from phalanx.zoo.rewards.video._frames import Consistency


class SubjectConsistency(Consistency):
    """`model`: folder or hub id of DINO, a ViTModel with its processor."""

    def __init__(self, model: str = "facebook/dino-vitb16", device: str = "cpu") -> None:
        config = load_part(AutoConfig, model, "model", "DINO")
        if config.model_type != "vit":
            raise ValueError(f"model={model!r} is a model of type {config.model_type}; expected DINO, of type vit")
        self._vit: Any = load_model(ViTModel, model, "model", "DINO", add_pooling_layer=False).to(device)
        self._vit.embeddings.interpolate_pos_encoding = self._position_embeddings
        processor = load_part(AutoImageProcessor, model, "model")
        mean, std = torch.tensor([processor.image_mean, processor.image_std], device=device).view(2, 3, 1, 1)
        self._edge: int = config.image_size
        self._mean, self._std, self._device = mean, std, torch.device(device)

    def features(self, frames: Tensor) -> Tensor:
        """The first token [F, D] of each of the frames [F, 3, H, W] in 0..1."""
        frames = frames.to(self._device)
        height, width = frames.shape[2:]
        long = int(self._edge * max(height, width) / min(height, width))
        size = (self._edge, long) if height <= width else (long, self._edge)
        frames = F.interpolate(frames, size=size, mode="bilinear")  # without antialiasing, as in VBench
        pixels = (frames - self._mean) / self._std
        features: Tensor = self._vit(pixels, interpolate_pos_encoding=True).last_hidden_state[:, 0]
        return features

    def _position_embeddings(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """DINO's position embeddings [1, 1 + patches, D] for frames of any size. They replace those of transformers,
        which interpolates by the exact ratio of the sizes, whereas DINO adds a tenth of a patch.
        """
        learnt: Tensor = self._vit.embeddings.position_embeddings
        patch, side = self._vit.config.patch_size, self._edge // self._vit.config.patch_size
        rows, columns = height // patch, width // patch
        if rows == columns == side:
            return learnt
        grid = learnt[:, 1:].unflatten(1, (side, side)).movedim(-1, 1)
        factors = ((rows + 0.1) / side, (columns + 0.1) / side)
        grid = F.interpolate(grid, scale_factor=factors, mode="bicubic")
        return torch.cat([learnt[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)
