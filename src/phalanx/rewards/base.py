"""Shared parts of rewards: the call signature, the exception that ends the job, and the base classes.

A reward maps B outputs, B prompts and B metadata dicts to B numbers or a RewardOutput. It may be called from several
threads at once, and may modify its arguments, which are copies.

The name of its first parameter determines what it gets: `images`, float32 [B, 3, H, W], or `videos`, float32
[B, F, 3, H, W], both in 0..1 on the CPU; `completions`, B texts; or `transcripts`, B lists of messages that begin with
the prompt's. `outputs` means images or completions, whichever the job generates; any other name means images.
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
from phalanx.types import JobError, Prompt, Samples, copied

Scores = Sequence[float] | NDArray[Any] | Tensor
MARK = "differentiable"  # attribute that `differentiable` sets on a function
UNJUDGED = "unjudged"  # extra of rewards with a time limit per sample: 1 for a sample without a verdict


class RewardError(JobError):
    """A call of a reward failed; the message is a single line with the name of the reward and the prompt."""


@dataclass(frozen=True)
class RewardOutput:
    """The scores of B outputs.

    extras: further values by name, B each, such as 1 for an output that could not be scored and 0 for any other.
    problem: why some scores are NaN, as a phrase to be used within a message.
    feedback: what is said about each output, None or an empty text for nothing: see the algorithm sdpo.
    """

    scores: Scores
    extras: Mapping[str, Scores] = field(default_factory=dict)
    problem: str | None = None
    feedback: Sequence[str | None] | None = None


class RewardWithExtras:
    """Base class of a reward that returns a RewardOutput in each call, with the extras named in `extras`.

    The mean of each extra over all ranks is logged as reward/<term>_<extra>. Extras are returned with the scores, not
    stored on the reward, because several of its calls may run at once.
    """

    extras: tuple[str, ...] = ()


@runtime_checkable
class ChecksRows(Protocol):
    """A reward that can refuse a row whose samples it could not score, before any sample is drawn."""

    def check_row(self, prompt: str, metadata: dict[str, Any], /) -> None:
        """Raise ValueError for such a row, with the reason as a phrase. It is called often and should be cheap."""


def objection_of(reward: object, prompt: str, metadata: dict[str, Any]) -> str | None:
    """Why samples of a row cannot be scored, according to the reward's `check_row`; None if they can."""
    if not isinstance(reward, ChecksRows):
        return None
    try:
        reward.check_row(prompt, copied(metadata))
    except Exception as error:  # whatever the user's code raises
        return reason(error).removeprefix("ValueError: ")
    return None


@runtime_checkable
class GivesAnswers(Protocol):
    """A reward that extracts an answer from each completion; evaluations use it for majority voting."""

    def answer(self, completion: str, /) -> str | None:
        """The answer in a normal form, such that equal answers are equal texts; None if there is none."""


@runtime_checkable
class HasGradient(Protocol):
    """A reward of images or videos that is differentiable with respect to them, as some algorithms require."""

    def with_gradient(self, outputs: Tensor, prompts: list[str], metadata: list[dict[str, Any]], /) -> Tensor:
        """Scores [B], differentiable with respect to `outputs`, which are on the rank's device."""


F = TypeVar("F", bound=Callable[..., Any])


def differentiable(function: F) -> F:
    """Mark a function as a reward whose scores, a tensor [B], are differentiable in its images or videos."""
    vars(function)[MARK] = True
    return function


class DeviceReward(ABC):
    """Base class of a reward with a torch model on the rank's device.

    Its constructor takes the keyword `device` in addition to the configured kwargs. It runs after the rollout, one call
    at a time, because during the rollout it would compete with sampling for the device.
    """

    @abstractmethod
    def __call__(self, outputs: Any, prompts: list[str], metadata: list[dict[str, Any]], /) -> Scores | RewardOutput:
        """Map images, videos or completions, depending on the name of the first parameter, to B numbers."""


class DifferentiableReward(DeviceReward):
    """Base class of a differentiable DeviceReward of images: see HasGradient."""

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B] of images [B, 3, H, W] in 0..1."""
        return self.with_gradient(images, prompts, metadata)

    @abstractmethod
    def with_gradient(self, images: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> Tensor:
        """Scores [B] of images [B, 3, H, W] in 0..1, differentiable with respect to the images."""


class PolicyReward(ABC):
    """Base class of a reward that is computed from the policy in training, such as its certainty about each sample.

    All ranks call it at the same point, after all samples of a step have been drawn. It is not used in validation.
    """

    takes = "completions"

    @abstractmethod
    def __call__(self, policy: Any, samples: Samples, passes: Passes, /) -> Tensor:
        """Scores of this rank's samples, float32 [B], without a gradient; `passes` splits them as training does."""


def transcript(prompt: Prompt, completion: str) -> list[dict[str, Any]]:
    """All messages of a sample, as a copy that a reward may modify."""
    messages = prompt.messages or [{"role": "user", "content": prompt.text}]
    plain = [*messages, {"role": "assistant", "content": completion}]
    copy: list[dict[str, Any]] = copied(prompt.meta["messages"] if TALKS in prompt.meta else plain)
    return copy


class OfEnvironment:
    """Base class of the reward that an environment gives: its share also weighs the rewards of single turns."""
