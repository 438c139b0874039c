"""Reward: CLIP's cosine similarity of image and prompt (arXiv 2104.08718, without its factor 2.5 and its clipping).

flow_grpo's clipscore is this times 100 / 30: weight 3.333 gives its scale.
"""

from typing import Any

from torch import Tensor

from phalanx.rewards.base import DifferentiableReward
from phalanx.zoo.rewards.image._clip import Clip


class ClipScore(DifferentiableReward):
    """`model`: folder or hub id of a CLIPModel with its processor. `column`: the column of the data with the text, such
    as a style, that images are compared with instead of the prompt.
    """

    def __init__(
        self, model: str = "openai/clip-vit-large-patch14", column: str | None = None, device: str = "cpu"
    ) -> None:
        self._clip, self._column = Clip(model, device), column

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a text."""
        if self._column is not None and not isinstance(metadata.get(self._column), str):
            raise ValueError(f"{self._column} {metadata.get(self._column)!r}; expected a text in this column")

    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B] in -1..1 of images [B, 3, H, W] in 0..1."""
        if self._column is not None:
            prompts = [meta[self._column] for meta in metadata]
        return (self._clip.images(images) * self._clip.prompts(prompts)).sum(-1)
