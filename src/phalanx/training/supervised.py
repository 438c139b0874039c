"""The loop of supervised training, shared by all kinds of policy."""

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.config.messages import ConfigError, near_multiples
from phalanx.config.run import RunConfig
from phalanx.data.streams import IndexStream
from phalanx.distributed.collectives import reduce_float
from phalanx.distributed.mesh import World
from phalanx.telemetry.step_metrics import peak_memory_gb
from phalanx.training.components import Job, TrainedPolicy, Training


def share_of_rank(cfg: RunConfig, section: str, noun: str, world_size: int) -> int:
    """Samples per rank and step; ConfigError if they do not divide into the passes that `section` configures."""
    micro, key = vars(cfg)[section].micro_batch_size_per_gpu, f"{section}.micro_batch_size_per_gpu"
    name, size, unit, over = "data.train_batch_size_per_gpu", cfg.data.train_batch_size_per_gpu, micro, "by"
    if size is None:
        name, size, unit = "data.train_batch_size", cfg.data.train_batch_size, world_size * micro
        over = f"over {world_size} ranks x"
    if size % unit:
        near = near_multiples(size, unit)
        raise ConfigError(f"{name}: {size} {noun} do not divide {over} {key} {micro}; nearest that do: {near}")
    return size // unit * micro


class Shares:
    """The samples of this rank: `per_rank` of the data's `samples` in each step, in passes of `micro`.

    `batch_size` counts the samples of all ranks; this rank's begin with number `first`.
    """

    def __init__(self, samples: int, cfg: RunConfig, section: str, noun: str, world: World) -> None:
        """section, noun: see share_of_rank."""
        self.samples, self.micro = samples, vars(cfg)[section].micro_batch_size_per_gpu
        self.per_rank = share_of_rank(cfg, section, noun, world.data_size)
        self.batch_size, self.first = self.per_rank * world.data_size, self.per_rank * world.data_rank
        self._stream = IndexStream(samples, self.batch_size, cfg.data.seed)

    def of_step(self, step: int) -> list[int]:
        """The numbers of this rank's samples in a step."""
        return self._stream.batch(step)[self.first : self.first + self.per_rank]


class Task(Protocol):
    """The samples and the loss on them: the base class of tasks. `noun`: the plural word for samples in metrics."""

    noun: str
    policy: TrainedPolicy
    shares: Shares

    def begin(self, steps: range) -> None:
        """Called once before the first of these training steps, for work that is cheaper ahead of them; none here."""
        return

    def passes(self, share: list[int], step: int) -> list[Any]:
        """The input of each forward and backward pass over this rank's samples; all ranks have equally many passes."""

    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The contribution of a pass to the loss of the whole batch of all ranks, and detached sums for `metrics`."""

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Metrics of a step from the sums of `loss`, added up over this rank's passes; here none besides the loss."""
        return {}


@dataclass
class SupervisedTrainer(Training):
    """A supervised training job."""

    job: Job
    task: Task

    @property
    def policy(self) -> TrainedPolicy:
        """The model that is trained."""
        return self.task.policy

    def fit(self) -> None:
        """Train to the last step."""
        job, task, shares = self.job, self.task, self.task.shares
        with job.logger:
            task.begin(range(job.progress.step, job.total_steps))
            for step in job.steps():
                start = time.perf_counter()
                with job.timers("update"):
                    row = self.update(step)
                seconds = time.perf_counter() - start
                job.progress.samples_seen += shares.batch_size
                row |= {
                    "perf/step_s": seconds,
                    f"perf/{task.noun}_per_gpu_per_s": shares.per_rank / job.world.context_size / seconds,
                    "perf/peak_memory_gb": reduce_float(peak_memory_gb(job.world.device), "max"),
                }
                job.timers.note_rate(shares.per_rank / job.world.context_size / seconds, task.noun)
                job.end_step(step + 1, row)

    def update(self, step: int) -> dict[str, float]:
        """Take one optimizer step on this rank's share of the step's samples, and return its metrics."""
        job, task = self.job, self.task
        passes = task.passes(task.shares.of_step(step), step)
        job.timers.expect(len(passes))
        losses, sums = [], []
        for i, batch in enumerate(passes):
            # gradients are summed across ranks, so `loss` already includes the denominator of the whole batch
            job.state.model.sharded.set_last_micro_batch(i == len(passes) - 1)
            loss, pass_sums = task.loss(batch)
            job.state.model.backward(loss)
            losses.append(loss.detach())
            sums.append(pass_sums)
            job.stops.after_micro_batch(job.timers)
        loss = torch.stack(losses).sum()
        stats = job.state.step(loss)
        row = {
            "train/loss": reduce_float(float(loss), "sum"),
            "actor/grad_norm": float(stats["grad_norm"]),
            "actor/lr": float(stats["lr"]),
            "actor/updates_non_finite": float(stats["skipped"]),
        }
        return row | task.metrics({name: sum(float(pass_sums[name]) for pass_sums in sums) for name in sums[0]})
