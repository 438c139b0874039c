"""The common parts of rewards: the signature, the error that ends the job, and the base classes.

A reward says what it takes of a policy's outputs by the name of its first parameter: `images` float32 [B, 3, H, W],
`videos` float32 [B, F, 3, H, W], both in 0..1 on the CPU, `completions`, B texts, or `transcripts`, B lists of messages
from the prompt's on. `outputs` stands for images or completions, whichever the job makes, and any other name for
images.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx.config.messages import reason
from phalanx.distributed.passes import Passes
from phalanx.telemetry.records import TALKS
from phalanx.types import JobError, Prompt, Samples

Scores = Sequence[float] | NDArray[Any] | Tensor
MARK = "differentiable"  # attribute of functions that `differentiable` marks
UNJUDGED = "unjudged"  # the extra of rewards that limit the time of each sample: 1 where it had no verdict


class RewardError(JobError):
    """A call of a reward failed; the message is one line with the reward's name and the prompt."""


@dataclass(frozen=True)
class RewardOutput:
    """The scores of B outputs. `extras`: B further numbers by name, such as 1 where an output could not be scored and 0
    where it could. `problem`: why some scores are NaN, a part of a line.
    """

    scores: Scores
    extras: Mapping[str, Scores] = field(default_factory=dict)
    problem: str | None = None


class RewardWithExtras:
    """Base class of a reward that returns RewardOutput: `extras` names those of every call.

    The mean of each across all ranks is logged as reward/<term>_<extra>. They come with the scores rather than stay in
    the reward: several of its calls may be under way at once.
    """

    extras: tuple[str, ...] = ()


class RewardFunction(Protocol):
    """A reward: B outputs, of the kind that its first parameter's name says, B prompts and metadata -> B numbers.

    It may be called from several threads at once, and may change its arguments.
    """

    def __call__(
        self, outputs: Any, prompts: list[str], metadata: list[dict[str, Any]], /
    ) -> Scores | RewardOutput: ...


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that can say of a row of the data, before any sample is drawn, that it could not score its samples."""

    def check_row(self, prompt: str, metadata: dict[str, Any], /) -> None:
        """Raise ValueError, with the reason as a part of a line, for such a row; cheap, as it is called often."""


def objection_of(reward: object, prompt: str, metadata: dict[str, Any]) -> str | None:
    """The reason why samples of a row of the data cannot be scored, as the reward's `check_row` gives it."""
    if not isinstance(reward, ChecksRows):
        return None
    try:
        reward.check_row(prompt, copied(metadata))
    except Exception as error:  # whatever the user's code raises
        return reason(error).removeprefix("ValueError: ")
    return None


@runtime_checkable
class GivesAnswers(Protocol):
    """A reward that scores an answer within a text, and can say which: an evaluation takes the majority of them."""

    def answer(self, completion: str, /) -> str | None:
        """The answer, the same text for equal ones; None if there is none."""


@runtime_checkable
class HasGradient(Protocol):
    """A reward of images or videos that can be differentiated by them, as some algorithms do."""

    def with_gradient(self, outputs: Tensor, prompts: list[str], metadata: list[dict[str, Any]], /) -> Tensor:
        """The scores [B] of a call, with a gradient in `outputs`, which are on the rank's device."""


F = TypeVar("F", bound=Callable[..., Any])


def differentiable(function: F) -> F:
    """Mark a function as a reward whose scores, a tensor [B], have a gradient in its images or videos."""
    vars(function)[MARK] = True
    return function


class DeviceReward(ABC):
    """Base class of a reward with a torch model on the rank's device.

    Its constructor takes the keyword `device` beside the configured kwargs. It runs after the rollout, one call at a
    time, since it would only compete with the sampling for the device.
    """

    @abstractmethod
    def __call__(self, outputs: Any, prompts: list[str], metadata: list[dict[str, Any]], /) -> Scores | RewardOutput:
        """Images, videos or completions, as its first parameter's name says -> B numbers."""


class DifferentiableReward(DeviceReward):
    """Base class of a DeviceReward of images that has a gradient: see HasGradient."""

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Images [B, 3, H, W] in 0..1 -> [B]."""
        return self.with_gradient(images, prompts, metadata)

    @abstractmethod
    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Images [B, 3, H, W] in 0..1 -> [B], with a gradient where the images have one."""


class PolicyReward(ABC):
    """Base class of a reward that is computed from the policy in training, such as its certainty of each sample.

    It is called on all ranks at the same point, once all samples of a step are drawn, and never in validation.
    """

    takes = "completions"

    @abstractmethod
    def __call__(self, policy: Any, samples: Samples, passes: Passes, /) -> Tensor:
        """This rank's samples -> float32 [B], without a gradient; `passes` cuts them as the training does."""


def copied(value: Any) -> Any:
    """Metadata as a reward may change it: dicts and lists are new ones, and what they hold at the end, such as images
    on disk, cannot be changed.
    """
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def transcript(prompt: Prompt, completion: str) -> list[dict[str, Any]]:
    """All messages of a sample, as a reward may change them."""
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    plain = [*messages, {"role": "assistant", "content": completion}]
    copy: list[dict[str, Any]] = copied(prompt.meta["messages"] if TALKS in prompt.meta else plain)
    return copy


def ground_truth(prompt: str, metadata: dict[str, Any], column: str = "ground_truth") -> str:
    """The text that an image of `prompt` is to show, of a list all with blanks between; ValueError if the data has
    none.
    """
    target = metadata.get(column)
    if isinstance(target, list) and all(isinstance(part, str) for part in target):
        target = " ".join(target)
    if not isinstance(target, str) or not target.strip():
        actual = f"no {column}" if target is None else f"{column} {target!r}"
        quoted = "a text in double quotes in the prompt, or " if column == "ground_truth" else ""
        raise ValueError(f'{actual} for the prompt "{prompt}" (expected {quoted}a column {column} in the data)')
    return target
