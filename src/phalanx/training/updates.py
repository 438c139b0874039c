"""The part of a training step that learns: advantages, other weights' views, replays and optimizer steps."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config.run import RLConfig
from phalanx.distributed.collectives import reduce_float, reduce_sum
from phalanx.distributed.seed import fold_in
from phalanx.functional.advantage import of_scored, without_gaps
from phalanx.telemetry.flops import peak_flops
from phalanx.training.batches import BatchPlan
from phalanx.training.critic import CriticTrainer
from phalanx.training.minibatches import MicroBatches, Units, optimizer_steps
from phalanx.training.parts import LoadedTeacher
from phalanx.training.run import Run, peak_memory_gb
from phalanx.training.step_metrics import token_metrics, update_metrics
from phalanx.types import Algorithm, Policy, Samples, Scored


class Updates(Run):
    """A run that learns from samples with rewards. `group_id` [N] numbers the prompts of all ranks' samples."""

    cfg: RLConfig
    plan: BatchPlan
    algorithm: Algorithm
    teachers: Mapping[str, LoadedTeacher]
    critic: CriticTrainer | None
    group_id: Tensor
    # samples of this rank that the last step trained, and their tokens, once for each time
    _trained = _trained_tokens = 0

    def update(self, samples: Samples, reward: Tensor, step: int) -> dict[str, float]:
        """All optimizer steps on the samples of training step `step`; reward [N] is that of all ranks' samples,
        NaN for those that are left out.
        """
        cfg, plan, algorithm, policy = self.cfg.actor, self.plan, self.algorithm, self.policy
        epochs = cfg.ppo_epochs + (0 if self.critic is None else self.critic.epochs)
        self.timers.expect(epochs * plan.updates * plan.passes if plan.budget is None else 0)
        if not algorithm.needs_reward:  # it trains on samples without one, too
            reward = without_gaps(reward, self.group_id)
        advantage = of_scored(algorithm.advantage, reward, self.group_id, 0.0)
        sample_mask = of_scored(algorithm.sample_mask, reward, self.group_id, False)
        numbers = algorithm.units(without_gaps(reward, self.group_id), self.group_id)
        units = Units.of(numbers, sample_mask, plan, self.world)
        mine = slice(self.world.rank * plan.per_rank, (self.world.rank + 1) * plan.per_rank)
        batches = MicroBatches(samples, advantage[mine], self.world.device)
        row: dict[str, float] = {}
        stats: list[list[dict[str, Any]]] = []  # of each optimizer step, of each micro-batch
        updates: list[dict[str, Any]] = []
        tokens, self._trained, self._trained_tokens = samples.tokens, 0, 0
        epochs = cfg.ppo_epochs if units.counted.any() else 0
        if algorithm.levels is None and epochs > 0:
            batches.reference_outputs = self.reference_outputs(batches, units)
        if algorithm.per_action and epochs > 0:
            row = self.credit(batches, units, sample_mask[mine])
        if self.critic is not None and step < self.critic.warmup:
            epochs = 0
        for epoch in range(epochs):
            if algorithm.levels is not None:  # each pass has noise of its own
                batches.corrupted = algorithm.corrupt(policy, samples, self.corruption_seeds(samples, step, epoch))
                batches.reference_outputs = self.reference_outputs(batches, units)
            mode, constant = cfg.loss_agg_mode, cfg.loss_scale_factor
            steps = optimizer_steps(batches.mask, units, plan, self.world, mode=mode, constant=constant, tokens=tokens)
            if epoch == 0 and plan.by_tokens and self.progress.rescoring:
                batches.samples = self.rescore_in(steps, samples)
            for parts in steps:
                stats.append([])
                total = torch.zeros((), device=self.world.device)
                for i, (rows, weight) in enumerate(parts):
                    batch = batches.select(rows, weight)
                    # gradients are summed across ranks with those of the last micro-batch, once
                    policy.trained.sharded.set_last_micro_batch(i == len(parts) - 1)
                    per_action, scalars = algorithm.loss(policy, batch)
                    loss = (per_action * batch.weight).sum()
                    loss.backward()
                    total += loss.detach()
                    stats[-1].append(scalars)
                    self._trained += len(rows)
                    self._trained_tokens += 0 if tokens is None else int(tokens[rows].sum())
                    self.timers.advance()
                if updates and self.too_far(stats[-1]):
                    self.learner.optimizer.drop_gradients()
                    break
                updates.append(self.step_optimizer(total))
            if len(updates) < len(stats):
                break
        return row | update_metrics("actor", stats, updates, plan.updates * cfg.ppo_epochs)

    def credit(self, batches: MicroBatches, units: Units, kept: Tensor) -> dict[str, float]:
        """Advantages of single actions in place of those of samples, and the critic's updates, if there is one; kept
        [B] bool: the samples of this rank that count. Returns metrics.
        """
        samples, device = batches.samples, self.world.device
        values = None if self.critic is None else self.critic.values(samples)
        mask = samples.mask & kept.to(device)[:, None]
        scored = Scored(batches.advantage.to(device), samples.log_prob, mask, batches.reference_outputs, values)
        found = self.algorithm.credit(scored, reduce_sum)
        batches.advantage = found.advantage
        if self.critic is None or values is None:
            return found.metrics
        return found.metrics | self.critic.update(samples, units, mask, values, found.returns, self.timers.advance)

    @torch.no_grad()
    def rescore_in(self, steps: list[list[tuple[Tensor, Tensor]]], samples: Samples) -> Samples:
        """The samples with log-probabilities of the very passes in which they are about to be trained."""
        start, log_prob = time.perf_counter(), samples.log_prob.clone()
        with self.policy.unsharded():
            for rows, _ in (part for parts in steps for part in parts):
                at = rows.to(self.world.device)
                log_prob[at] = self.policy.replay(samples.trace.select(at)).log_prob
        seconds = time.perf_counter() - start
        self.timers.add("rescore", seconds)
        self.timers.add("update", -seconds)  # within which it runs
        return replace(samples, log_prob=log_prob)

    def too_far(self, scalars: list[dict[str, Any]]) -> bool:
        """Whether the mean ratio of an update on all ranks is above algorithm.early_stop_imp_ratio."""
        limit = vars(self.cfg.algorithm).get("early_stop_imp_ratio")
        if limit is None or "ratio_mean" not in scalars[0]:
            return False
        total = sum(float(row["ratio_mean"]) for row in scalars)
        return reduce_float(total, "sum") > limit * len(scalars) * self.world.size

    def corruption_seeds(self, samples: Samples, step: int, epoch: int) -> list[int]:
        """A seed for each sample of this rank, a function of (trainer.seed, step, sample, epoch)."""
        return [fold_in(self.cfg.trainer.seed, step, int(i), "forward", epoch) for i in samples.index]

    @torch.no_grad()
    def reference_outputs(self, batches: MicroBatches, units: Units) -> dict[str, Tensor]:
        """What the algorithm wants of other weights, about the samples of this rank's units: [B, ...] by name, with the
        samples in their places.
        """
        found, tokens = {}, batches.samples.tokens
        passes = self.plan.passes_of(self.plan.together)
        cut = passes.parts(len(units.mine), None if tokens is None else tokens[units.mine])
        parts = [units.mine[rows] for rows in cut]
        for name in self.algorithm.references:
            policy, theirs, weights = self._reference(name, batches)
            results = []
            with weights, policy.unsharded():
                for part in parts:
                    batch = theirs.select(part.flatten(), torch.ones(len(part), batches.mask.shape[1]))
                    results.append(self.algorithm.reference_output(policy, batch))
            outputs = torch.cat(results)
            found[name] = outputs.new_zeros(self.plan.per_rank, *outputs.shape[1:])
            found[name][torch.cat(parts).flatten().to(outputs.device)] = outputs
        return found

    def _reference(self, name: str, batches: MicroBatches) -> tuple[Policy, MicroBatches, AbstractContextManager[None]]:
        """Who gives the outputs of that name, about which samples, and with which weights in place."""
        if name in self.teachers:
            teacher = self.teachers[name]
            return teacher.policy, replace(batches, samples=teacher.samples(batches.samples)), nullcontext()
        return self.policy, batches, nullcontext() if name == "policy" else self.policy.using(name)

    def after_step(self, step: int) -> None:
        """After training step number `step` (from 1): the algorithm's own weights follow the policy's."""
        averages = self.learner.averages
        for name in self.algorithm.averages:
            averages[name].update(self.algorithm.decay(name, step))
        sync = self.cfg.actor.ref_model_sync_steps
        if sync is not None and step % sync == 0 and "reference" in averages:
            averages["reference"].update(0.0)

    # -- performance ----------------------------------------------------------------------------------------------

    def performance(self, samples: Samples, seconds: float) -> dict[str, float]:
        """Throughput, utilisation and memory of the step."""
        plan = self.plan
        row = {
            "perf/step_s": seconds,
            f"perf/{self.rollout.noun}_per_gpu_per_s": plan.per_rank / seconds,
            "perf/peak_memory_gb": reduce_float(peak_memory_gb(self.world.device), "max"),
        }
        if self.rewards is not None:  # on worker threads; time/reward is what was left to wait for
            row["perf/reward_busy_s"] = self.rewards.busy_s
            if self.rewards.judge_s is not None:
                row["perf/judge_busy_s"] = self.rewards.judge_s
        peak = peak_flops(self.world.device, self.policy.trained.dtype)
        if peak is not None:
            flops = reduce_float(float(self.step_flops(samples)), "sum") / self.world.size  # each rank goes by its own
            row["perf/mfu"] = flops / (seconds * self.world.size * peak)
        if samples.lengths is not None:
            row |= token_metrics(samples.lengths, self._trained_tokens, seconds, self.timers)
        return row

    def step_flops(self, samples: Samples) -> int:
        """Floating-point operations of the last step on all ranks."""
        plan = self.plan
        costs = [1.0 for name in self.algorithm.references if name not in self.teachers]
        costs += [teacher.relative_cost(samples) for teacher in self.teachers.values()]
        if self.critic is not None:
            costs.append(self.critic.relative_cost(self.policy.trained))
        references = sum(costs) * plan.reference_samples / plan.per_rank if self._trained > 0 else 0.0
        return self.policy.step_flops(
            samples,
            actions=self.algorithm.levels or samples.mask.shape[1],
            count=plan.samples,
            updates=self._trained / plan.per_rank,
            references=references,
        )
