"""The components that a kind of policy provides to a job, and the interfaces that the loops use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from phalanx.config.run import ModelConfig
from phalanx.config.section import copy_with
from phalanx.distributed.mesh import World
from phalanx.models.trained import TrainedModel
from phalanx.rewards import RewardSet
from phalanx.telemetry.timers import Timers
from phalanx.training.optim import TrainState
from phalanx.training.progress import Progress
from phalanx.training.stops import Stops
from phalanx.types import Policy, Prompt, Rollout, Samples, Teacher

M = TypeVar("M", bound=ModelConfig)


class Job(Protocol):
    """A training job around the loop, see phalanx.run.job. state: the first of the trained models."""

    world: World
    progress: Progress
    stops: Stops
    timers: Timers
    total_steps: int
    state: TrainState

    @property
    def logger(self) -> AbstractContextManager[Any]: ...

    def run(self, fit: Callable[[], None], report: Callable[[Path], object] | None = None) -> None:
        """Train by `fit`, and end the job; `report` writes the report of its output folder."""

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining training steps, counted from 0."""

    def end_step(self, step: int, row: dict[str, float]) -> None:
        """Validate, log and save, each if due, after training step number `step` (from 1) with metrics `row`."""


class Training(ABC):
    """A training job with what it trains, on one rank: the base class of each kind of job."""

    job: Job

    @property
    def world(self) -> World:
        """The ranks that train."""
        return self.job.world

    @abstractmethod
    def fit(self) -> None:
        """Train to the last step."""

    def run(self, report: Callable[[Path], object] | None = None) -> None:
        """Train, write the `report` of the output folder and print a summary. Raises JobError, or Stopped after the
        state was saved.
        """
        self.job.run(self.fit, report)


class TrainedPolicy(Policy, Protocol):
    """The policy as the loop sees it. `trained` has its weights."""

    @property
    def trained(self) -> TrainedModel: ...

    def step_flops(
        self, samples: Samples, *, actions: int, count: int, updates: float, references: float, recomputed: bool
    ) -> int:
        """Floating-point operations of a training step on `count` samples like these, `actions` of each.

        updates: how often each sample is trained. references: how often each passes through other weights, in units of
        a forward pass of the policy. recomputed: include what gradient checkpointing computes again.
        """


class LoadedTeacher(Protocol):
    """A frozen model beside the policy, on all ranks."""

    @property
    def policy(self) -> Policy: ...

    def samples(self, samples: Samples) -> Samples:
        """The policy's samples as inputs of the teacher, with its own conditioning."""

    def relative_cost(self, samples: Samples) -> float:
        """Operations of the teacher's pass over a sample, relative to the policy's."""


class Critic(Protocol):
    """A value model, trained beside the policy to predict the return. `trained` has its weights."""

    @property
    def trained(self) -> TrainedModel: ...

    def values(self, trace: Any) -> Tensor:
        """[B, A] float32 for a Trace: the predicted return before each action, with a gradient."""


@dataclass(frozen=True)
class JobComponents:
    """The components that a kind of policy provides to a job.

    rollout and rewards: None if other ranks sample. exact and noun: those of the rollout, on whichever ranks it is (see
    phalanx.types.Rollout). val_sets: held-out prompts by name.
    """

    world: World
    rewards: RewardSet | None
    policy: TrainedPolicy
    rollout: Rollout | None
    val_sets: dict[str, list[Prompt]]
    exact: bool = True
    noun: str = "samples"


def taught_model(teacher: Teacher, model: M) -> M:
    """The section `model` of a frozen teacher, from the policy's; in messages, its `path` has the teacher's key."""
    given = {"path": teacher.path, "revision": teacher.revision, "gradient_checkpointing": False}
    taught = copy_with(model, **given, lora_rank=0, lora_path=None, quantization=None)
    return taught.rename_keys("model", path=teacher.key)
