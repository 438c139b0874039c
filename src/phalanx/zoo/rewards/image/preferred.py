"""Reward: 1 for the preferred image of a pair in the data and 0 for the other one (rollout.engine=dataset)."""

from typing import Any

from torch import Tensor


def preferred(images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """The data's preference for each image; 0 for images that the policy sampled in validation.

    Raises ValueError for images that do not come from the data.
    """
    for prompt, meta in zip(prompts, metadata, strict=True):
        if "preferred" not in meta:
            raise ValueError(f'no data says whether this image of "{prompt}" is preferred; set rollout.engine=dataset')
    return [float(meta["preferred"] is True) for meta in metadata]
