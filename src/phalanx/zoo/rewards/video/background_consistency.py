"""Reward: VBench's background consistency (arXiv 2311.17982): the similarity of a video's frames by CLIP, in 0..1."""

from torch import Tensor

from phalanx.zoo.rewards.image._clip import Clip
from phalanx.zoo.rewards.video._frames import Consistency


class BackgroundConsistency(Consistency):
    """`model`: folder or hub id of a CLIPModel with its processor."""

    def __init__(self, model: str = "openai/clip-vit-base-patch32", device: str = "cpu") -> None:
        self._clip = Clip(model, device, text=False, antialias=False)

    def features(self, frames: Tensor) -> Tensor:
        """CLIP's embeddings [F, D] of frames [F, 3, H, W] in 0..1."""
        return self._clip.images(frames)
