"""The components that a kind of policy provides to a job, and the interfaces that the loops use."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from phalanx.config.run import ModelConfig
from phalanx.config.section import copy_with
from phalanx.distributed.mesh import World
from phalanx.models.trained import TrainedModel
from phalanx.telemetry.records import Record
from phalanx.telemetry.timers import Timers
from phalanx.training.optim import TrainState
from phalanx.training.progress import Progress
from phalanx.training.stops import Stops
from phalanx.types import Policy, Samples, Teacher

Records = dict[str, list[Record]]  # by name of the validation set

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


class Sampling(Protocol):
    """The interface between a job and the code that samples, on this rank
    (phalanx.run.validation.Validator) or on ranks of other roles (phalanx.run.disaggregated.schedules).
    """

    @property
    def validates(self) -> int:
        """Number of held-out prompts in a validation; 0 without validation."""

    def begin(self, step: int, total_steps: int, kept: Sequence[Tensor]) -> None:
        """Called once per start of the job, before its first training step, `step` of `total_steps`. kept: the
        `in_flight` bytes of the checkpoint, one entry per rank that wrote it.
        """

    def validate(self, step: int, weights: str | None) -> tuple[dict[str, float], Records]:
        """Validate after `step` training steps with other weights (None: the policy's own). Returns the metrics and, on
        rank 0, the samples to keep of each set.
        """

    def in_flight(self, step: int) -> Tensor | None:
        """Bytes [K] uint8 of this rank's samples already drawn for training after `step` steps; None if none."""

    def held(self, step: int) -> list[Tensor]:
        """The results of `in_flight` of all ranks, as far as this rank has them, too."""

    def drawing(self, step: int) -> list[Tensor]:
        """The version of the weights that draw what is in flight after `step` steps, and this rank's parts of them, in
        a job that survives lost ranks; empty if nothing is. `begin` draws it again with what was written into them.
        """

    def end(self, stop: int = 0) -> None:
        """End the ranks of other roles. stop: the signal that ended the job, 0 if none did."""


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
    """A frozen model beside the policy, on all ranks. `told`: it only evaluates samples whose prompts have `told`."""

    @property
    def policy(self) -> Policy: ...

    @property
    def told(self) -> bool: ...

    def samples(self, samples: Samples) -> Samples:
        """The policy's samples as inputs of the teacher, with its own conditioning."""

    def relative_cost(self, samples: Samples) -> float:
        """Operations of the teacher's pass over a sample, relative to the policy's."""


# Gives the prompts of this rank's samples what a teacher reads, from the rewards [N] and the feedback [N] (or none) of
# all ranks' samples; a collective of all ranks.
Tell = Callable[[Samples, Tensor, list[str]], Samples]


class Critic(Protocol):
    """A value model, trained beside the policy to predict the return. `trained` has its weights."""

    @property
    def trained(self) -> TrainedModel: ...

    def values(self, trace: Any) -> Tensor:
        """[B, A] float32 for a Trace: the predicted return before each action, with a gradient."""


def taught_model(teacher: Teacher, model: M) -> M:
    """The section `model` of a frozen teacher, from the policy's; in messages, its `path` has the teacher's key."""
    given = {"path": teacher.path, "revision": teacher.revision, "gradient_checkpointing": False}
    taught = copy_with(model, **given, lora_rank=0, lora_path=None, quantization=None)
    return taught.rename_keys("model", path=teacher.key)
