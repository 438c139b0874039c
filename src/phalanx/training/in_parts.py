"""Optimizer steps on samples that arrive in parts, each trained while the next one is drawn."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from phalanx.distributed.collectives import reduce_sum
from phalanx.functional.advantage import of_scored, without_gaps
from phalanx.functional.aggregation import count_actions
from phalanx.training.collecting import Collected
from phalanx.training.minibatches import MicroBatches, Units, optimizer_steps
from phalanx.training.step_metrics import merged_rows, update_metrics
from phalanx.training.updates import Updates

Pass = tuple[MicroBatches, Tensor, Tensor]  # samples, the rows of a forward and backward pass, and their weights


class UpdatesInParts(Updates):
    """A run whose samples may come in parts of whole groups."""

    def learn(self, found: Collected, step: int) -> tuple[Collected, dict[str, float]]:
        """All optimizer steps of training step `step`, and their metrics; returns what was found as well, with the
        metrics of all parts.
        """
        if found.later is None:
            return found, self.update(found.samples, found.reward, step)
        rows, lengths = list[dict[str, float]](), list[Tensor]()

        def noted(part: Collected) -> Collected:
            rows.append(part.row)
            if part.samples.lengths is not None:
                lengths.append(part.samples.lengths)
            return part

        row = self.update_in_parts(map(noted, chain([found], found.later)))
        self._lengths = torch.cat(lengths) if lengths else None
        return replace(found, row=merged_rows(rows)), row

    def update_in_parts(self, parts: Iterator[Collected]) -> dict[str, float]:
        """The optimizer steps on a training step's samples, each on the next few parts."""
        self._trained = self._trained_tokens = 0
        each = self.cfg.rollout.parts // self.plan.updates
        stats: list[list[dict[str, Any]]] = []  # of each optimizer step, of each micro-batch
        updates: list[dict[str, Any]] = []
        for _ in range(self.plan.updates):
            scalars, total = self.accumulate(islice(parts, each))
            if not scalars:  # nothing to learn from
                continue
            stats.append(scalars)
            if updates and self.too_far(scalars):
                self.learner.optimizer.drop_gradients()
                break
            updates.append(self.step_optimizer(total))
        for _ in parts:  # those behind an early stop are on their way already
            pass
        return update_metrics("actor", stats, updates, self.plan.updates)

    def accumulate(self, parts: Iterator[Collected]) -> tuple[list[dict[str, Any]], Tensor]:
        """The gradient of an optimizer step on these parts; the scalars of each micro-batch, and this rank's loss."""
        counts = torch.zeros(2, dtype=torch.int64)  # actions and samples of this rank that count
        total, scalars = torch.zeros((), device=self.world.device), list[dict[str, Any]]()
        passes = self._passes(parts, counts)
        upcoming = next(passes, None)
        while upcoming is not None:
            now, upcoming = upcoming, next(passes, None)  # the last one is known when no other one comes
            loss, said = self.learn_from(*now, last=upcoming is None)
            total += loss
            scalars.append(said)
        # the number of tokens is known only now: gradients are of sums until here
        actions, samples = reduce_sum(counts).tolist()
        denominator = max(actions if self.cfg.actor.loss_agg_mode == "token-mean" else samples, 1)
        self.learner.optimizer.scale_gradients(1 / denominator)
        return scalars, total / denominator

    def _passes(self, parts: Iterator[Collected], counts: Tensor) -> Iterator[Pass]:
        """The passes over the samples of all parts, in order, on all ranks equally many; their actions and samples are
        added to `counts` [2].
        """
        cfg, algorithm = self.cfg.actor, self.algorithm
        for found in parts:
            samples, reward = found.samples, found.reward
            count = len(reward)
            group_id = torch.arange(count) // self.cfg.rollout.n
            each = count // self.world.data_size
            plan = replace(self.plan, samples=count, per_rank=each, units=each, updates=1)
            advantage = of_scored(algorithm.advantage, reward, group_id, 0.0)
            sample_mask = of_scored(algorithm.sample_mask, reward, group_id, False)
            numbers = algorithm.units(without_gaps(reward, group_id), group_id)
            units = Units.of(numbers, sample_mask, plan, self.world)
            mine = slice(self.world.data_rank * each, (self.world.data_rank + 1) * each)
            batches = MicroBatches(samples, advantage[mine], self.world.device)
            if units.counted.any():
                batches.reference_outputs = self.reference_outputs(batches, units)
            steps = optimizer_steps(
                batches.mask,
                units,
                plan,
                self.world,
                mode=cfg.loss_agg_mode,
                constant=cfg.loss_scale_factor,
                tokens=samples.tokens,
                summed=True,
            )
            counts += count_actions(batches.mask.cpu()[units.mine[:, 0]], units.kept)
            for rows, weight in (row for step in steps for row in step):
                yield batches, rows, weight
