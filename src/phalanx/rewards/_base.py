"""What rewards share: the signature, the error that ends the job, and the base classes."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.types import JobError

Scores = Sequence[float] | NDArray[Any] | Tensor


class RewardError(JobError):
    """A call of a reward failed; the message is one line with the reward's name and the prompt."""


@dataclass(frozen=True)
class Marked:
    """The scores of B images, and of each mark a row: B numbers, 1 where an image has the mark and 0 where not."""

    scores: Scores
    marks: Mapping[str, Scores]


class Marking:
    """Base class of a reward that returns Marked: `marks` names the rows, which are the same ones at every call.

    The mean of a row over the world is logged as reward/<term>_<mark>. Rows come with the scores rather than stay in
    the reward: several of its calls may be under way at once.
    """

    marks: tuple[str, ...] = ()


class RewardFunction(Protocol):
    """A reward: images float32 [B, 3, H, W] in 0..1 on the CPU, B prompts, B dicts of metadata -> B numbers.

    It may be called from several threads at once, and writes to none of its arguments: other rewards get the same ones.
    """

    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Scores | Marked: ...


class DeviceReward(ABC):
    """Base class of a reward with a torch model on the rank's device.

    Its constructor takes the keyword `device` beside the configured kwargs. It runs after the rollout, one call at a
    time, since it would only compete with the sampling for the device.
    """

    @abstractmethod
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Scores | Marked:
        """Images [B, 3, H, W] in 0..1 on the CPU -> B numbers."""


def to_uint8(images: Tensor) -> Tensor:
    """Images [B, 3, H, W] in 0..1 -> uint8 [B, 3, H, W]: what a PNG of the image would hold."""
    return images.mul(255).round().clamp(0, 255).to(torch.uint8)


def pil_image(image: Tensor) -> Any:
    """An image, uint8 [3, H, W], as PIL has it."""
    from PIL import Image

    return Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())


def ground_truth(prompt: str, metadata: dict[str, Any]) -> str:
    """The text that an image of `prompt` is to show; ValueError where the data has none."""
    target = metadata.get("ground_truth")
    if not isinstance(target, str) or not target.strip():
        found = "no ground_truth" if target is None else f"ground_truth {target!r}"
        raise ValueError(
            f'{found} for the prompt "{prompt}" (right is a text in double quotes in the prompt, '
            "or a column ground_truth in the data)"
        )
    return target
