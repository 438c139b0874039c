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
    _lengths: Tensor | None = None  # of this rank's samples, where those of the step come in parts

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
        mine = slice(self.world.data_rank * plan.per_rank, (self.world.data_rank + 1) * plan.per_rank)
        batches = MicroBatches(samples, advantage[mine], self.world.device)
        row: dict[str, float] = {}
        stats: list[list[dict[str, Any]]] = []  # of each optimizer step, of each micro-batch
        updates: list[dict[str, Any]] = []
        tokens, self._trained, self._trained_tokens = samples.tokens, 0, 0
        learns = bool(units.counted.any())
        if learns and algorithm.levels is None:
            batches.reference_outputs = self.reference_outputs(batches, units)
        if learns and algorithm.per_action:
            row = self.credit(batches, units, sample_mask[mine])
        critic_alone = self.critic is not None and step < self.critic.warmup
        for epoch in range(cfg.ppo_epochs if learns and not critic_alone else 0):
            if algorithm.levels is not None:  # each pass has noise of its own
                batches.corrupted = algorithm.corrupt(policy, samples, self.corruption_seeds(samples, step, epoch))
                batches.reference_outputs = self.reference_outputs(batches, units)
            mode, constant = cfg.loss_agg_mode, cfg.loss_scale_factor
            steps = optimizer_steps(batches.mask, units, plan, self.world, mode=mode, constant=constant, tokens=tokens)
            if epoch == 0 and plan.by_tokens and self.progress.rescoring and not samples.on_policy:
                batches.samples = self.rescore_in(steps, samples)
            for parts in steps:
                stats.append([])
                total = torch.zeros((), device=self.world.device)
                for i, (rows, weight) in enumerate(parts):
                    loss, scalars = self.learn_from(batches, rows, weight, last=i == len(parts) - 1)
                    total += loss
                    stats[-1].append(scalars)
                if updates and self.too_far(stats[-1]):
                    self.learner.optimizer.drop_gradients()
                    break
                updates.append(self.step_optimizer(total))
            if len(updates) < len(stats):
                break
        return row | update_metrics("actor", stats, updates, plan.updates * cfg.ppo_epochs)

    def learn_from(
        self, batches: MicroBatches, rows: Tensor, weight: Tensor, *, last: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Forward and backward pass of the samples in `rows` [b] with the weights [u, A] of their actions; the loss and
        the scalars. `last`: of an optimizer step.
        """
        batch, tokens = batches.select(rows, weight), batches.samples.tokens
        # gradients are summed across ranks with those of the last micro-batch, once
        self.policy.trained.sharded.set_last_micro_batch(last)
        per_action, scalars = self.algorithm.loss(self.policy, batch)
        loss = (per_action * batch.weight).sum()
        loss.backward()
        self._trained += len(rows)
        self._trained_tokens += 0 if tokens is None else int(tokens[rows].sum())
        self.timers.advance()
        return loss.detach(), scalars

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
        return reduce_float(total, "sum") > limit * len(scalars) * self.world.data_size

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
            found[name] = outputs.new_zeros(len(batches.advantage), *outputs.shape[1:])
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
        link = self.world.link
        ranks = self.world.size if link is None else link.roles.world_size
        row = {
            "perf/step_s": seconds,
            f"perf/{self.rollout.noun}_per_gpu_per_s": self.plan.samples / ranks / seconds,
            "perf/peak_memory_gb": reduce_float(peak_memory_gb(self.world.device), "max"),
        }
        if link is not None:
            row["idle/actor"] = self.timers.seconds("wait") / seconds
        peak = peak_flops(self.world.device, self.policy.trained.dtype)
        if peak is not None:
            # each rank goes by its own samples
            mine = [float(self.step_flops(samples, recomputed=again)) for again in (False, True)]
            flops = reduce_sum(torch.tensor(mine, dtype=torch.float64)) / self.world.data_size
            used = flops / (seconds * ranks * peak)
            row["perf/mfu"], row["perf/hfu"] = used.tolist()
        lengths = samples.lengths if self._lengths is None else self._lengths
        if lengths is not None:
            row |= token_metrics(lengths, self._trained_tokens, seconds, self.timers, ranks)
        return row

    def step_flops(self, samples: Samples, *, recomputed: bool) -> int:
        """Floating-point operations of the last step on all ranks; `recomputed`: with what checkpointing repeats."""
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
            recomputed=recomputed,
        )
