"""Supervised training: the loop, once, for every kind of policy."""

import time
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from phalanx.config.load import ConfigError
from phalanx.config.run import EmaConfig, RunConfig
from phalanx.data.streams import IndexStream
from phalanx.distributed.collectives import reduce_float
from phalanx.training.parts import Parts
from phalanx.training.run import Run, peak_memory_gb


def share_of_rank(cfg: RunConfig, micro: int, key: str, noun: str, world_size: int) -> int:
    """A rank's samples per step, in passes of `micro`, which `key` says; ConfigError where they do not divide."""
    size, each = cfg.data.batch_size(world_size), cfg.data.train_batch_size_per_gpu
    if each is not None and each % micro:
        below = max(each // micro, 1) * micro
        raise ConfigError(
            f"data.train_batch_size_per_gpu: {each} {noun} do not divide by {key} {micro}; nearest that do: {below} or "
            f"{below + micro}"
        )
    unit = world_size * micro
    if size % unit:
        below = max(size // unit, 1) * unit
        raise ConfigError(
            f"data.train_batch_size: {size} {noun} do not divide over {world_size} ranks x {key} {micro}; nearest that "
            f"do: {below} or {below + unit}"
        )
    return size // world_size


class Supervised(Run):
    """A run that learns from samples that are given: `fit()` runs it."""

    noun = "samples"

    def __init__(self, cfg: RunConfig, parts: Parts, samples: int, per_rank: int, micro: int, ema: EmaConfig) -> None:
        """`samples` there are, of which a step takes `per_rank` for each rank, in passes of `micro`."""
        super().__init__(cfg, parts)
        self.per_rank, self.micro = per_rank, micro
        self.batch_size = per_rank * parts.world.data_size
        self.stream = IndexStream(samples, self.batch_size, cfg.data.seed)
        steps = cfg.trainer.total_training_steps
        if steps is None:
            assert cfg.trainer.total_epochs is not None
            steps = -(-int(cfg.trainer.total_epochs * samples) // self.batch_size)
        self.prepare(steps, steps, ema)

    @abstractmethod
    def passes(self, share: list[int], step: int) -> list[Any]:
        """What each forward and backward pass over this rank's samples of a step needs, on all ranks equally many."""

    @abstractmethod
    def loss(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of a pass in the loss of the whole batch, over all ranks, and detached sums of this rank."""

    def begin_fit(self) -> None:
        """What is cheaper done once, before the first step."""

    def fit(self) -> None:
        """Train to the last step."""
        with self.logger:
            self.begin_fit()
            self.begin()
            for step in range(self.progress.step, self.total_steps):
                start = time.perf_counter()
                with self.timers("update"):
                    row = self.update(step)
                seconds = time.perf_counter() - start
                self.progress.samples_seen += self.batch_size
                row |= {
                    "perf/step_s": seconds,
                    f"perf/{self.noun}_per_gpu_per_s": self.per_rank / self.world.context_size / seconds,
                    "perf/peak_memory_gb": peak_memory_gb(self.world.device),
                }
                self.end_step(step + 1, row)
            self.checkpointer.wait()

    def update(self, step: int) -> dict[str, float]:
        """One optimizer step on this rank's share of the step's samples."""
        passes = self.passes(self.share(step), step)
        self.timers.expect(len(passes))
        losses, sums = [], []
        for i, batch in enumerate(passes):
            # gradients are summed across ranks, so each loss is divided by what is in the whole batch
            self.policy.trained.sharded.set_last_micro_batch(i == len(passes) - 1)
            loss, found = self.loss(batch)
            loss.backward()
            losses.append(loss.detach())
            sums.append(found)
            self.timers.advance()
        loss = torch.stack(losses).sum()
        stats = self.step_optimizer(loss)
        row = {
            "train/loss": reduce_float(float(loss), "sum"),
            "actor/grad_norm": float(stats["grad_norm"]),
            "actor/lr": float(stats["lr"]),
            "actor/updates_non_finite": float(stats["skipped"]),
        }
        return row | self.metrics({name: sum(float(found[name]) for found in sums) for name in sums[0]})

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """What the sums that `loss` returns, over this rank's passes, say of the step."""
        return {}

    def share(self, step: int) -> list[int]:
        """The numbers of this rank's samples of a step."""
        return self.stream.batch(step)[self.first : self.first + self.per_rank]

    @property
    def first(self) -> int:
        """The place of this rank's first sample in a step's batch."""
        return self.world.data_rank * self.per_rank
