"""The loop of reinforcement learning, once, for every algorithm and every kind of policy.

It knows samples, their actions and log-probabilities, rewards and advantages. What a sample is (a picture, a text) is
the business of the policy and the rollout that it is handed.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config.load import ConfigError
from phalanx.config.run import RLConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.collectives import all_gather, reduce_float, reduce_sum
from phalanx.distributed.seed import fold_in
from phalanx.functional.advantage import informative, of_scored, without_gaps
from phalanx.rollout.correction import rescore
from phalanx.telemetry.flops import peak_flops
from phalanx.training.batches import BatchPlan
from phalanx.training.critic import CriticTrainer
from phalanx.training.minibatches import MicroBatches, Units, optimizer_steps
from phalanx.training.parts import LoadedTeacher, Parts
from phalanx.training.run import Run, peak_memory_gb
from phalanx.training.step_metrics import reward_metrics, update_metrics
from phalanx.types import Algorithm, Policy, Samples, Scored

log = logging.getLogger(__name__)

FLAT_STEPS = 10  # without any difference between rewards, until it is said


class Trainer(Run):
    """Reinforcement learning: `fit()` runs it. See phalanx.training.flow_rl.build for what it is handed."""

    cfg: RLConfig

    def __init__(
        self,
        cfg: RLConfig,
        plan: BatchPlan,
        algorithm: Algorithm,
        parts: Parts,
        prompts: PromptStream,
        teachers: Mapping[str, LoadedTeacher] | None = None,
        critic: CriticTrainer | None = None,
    ) -> None:
        """`teachers` are the algorithm's, loaded, and `critic` is the one that it wants. Raises ConfigError for a
        reference that cannot follow.
        """
        super().__init__(cfg, parts)
        self.plan, self.algorithm, self.prompts, self.critic = plan, algorithm, prompts, critic
        self.teachers = dict(teachers or {})
        averages = list(algorithm.averages)
        sync = cfg.actor.ref_model_sync_steps
        if "reference" in algorithm.references:
            if sync is None:
                self.policy.trained.keep_reference()
            else:
                averages.append("reference")
        elif sync is not None:
            raise ConfigError(
                f"actor.ref_model_sync_steps: {sync} has no reference to sync; set algorithm.kl_loss_coef > 0, or "
                "leave it out"
            )
        steps = cfg.trainer.total_training_steps
        if steps is None:
            assert cfg.trainer.total_epochs is not None
            steps = prompts.steps(cfg.trainer.total_epochs)
        beside, trained = {}, steps
        if critic is not None:
            beside["critic"] = critic.prepare(steps, offload=cfg.parallel.optimizer_offload)
            trained = max(steps - critic.warmup, 0)
        self.prepare(steps, trained * plan.updates * cfg.actor.ppo_epochs, cfg.actor.ema, averages, beside=beside)
        if cfg.rollout.max_num_gen_batches > 1 and self.world.rank == 0:
            log.warning(
                "rollout.max_num_gen_batches draws new prompts, as in verl; before, it drew the same ones again, "
                "which is now rollout.max_draws_per_prompt"
            )
        self.group_id = torch.arange(plan.samples) // cfg.rollout.n
        self._flat_steps = 0  # in a row, without any difference between rewards
        self._trained = 0  # samples of this rank that the last step trained, once for each time

    def batch(self) -> str:
        updates = "update" if self.plan.updates == 1 else "updates"
        return f"{super().batch()} in {self.plan.updates} {updates}"

    def fit(self) -> None:
        """Train to the last step."""
        with self.logger:
            self.begin()
            for step in range(self.progress.step, self.total_steps):
                start = time.perf_counter()

                # Sample. Each rank draws its share; rewards score its micro-batches while it goes on.
                samples = self.sample(step)
                samples, mismatch = self.rescore(samples)

                # Reward, over all ranks. Groups that would teach nothing can be drawn again.
                samples, reward, scores = self.reward(samples, step)

                # Advantage, then optimizer steps: replay, loss x weight, backward, step.
                with self.timers("update"):
                    row = self.update(samples, reward, step)
                    self.guard(row)
                    if self.stepped:
                        self.after_step(step + 1)

                # Validate, log and save, each where it is due.
                row |= self.rollout.metrics(samples, reward) | mismatch | scores
                row |= self.performance(samples, time.perf_counter() - start)
                self.progress.samples_seen += self.plan.samples
                del samples
                self.end_step(step + 1, row)
            self.checkpointer.wait()

    # -- sampling -------------------------------------------------------------------------------------------------

    def sample(self, step: int) -> Samples:
        """This rank's samples of training step `step`, which are with the rewards when it returns."""
        seed = self.cfg.trainer.seed
        with self.timers("encode"):
            self.rollout.prepare(self.prompts.batch, step, self.total_steps)
        with self.timers("rollout"), self.behaviour(), self.rollout.awake():
            self.timers.expect(-(-self.plan.per_rank // self.rollout.micro_batch_size))
            samples = self.rollout.sample(self.prompts.batch(step), seed=seed, step=step, each=self.submit)
        self.ask()
        return samples

    def behaviour(self) -> AbstractContextManager[None]:
        """The weights that sample for training."""
        name = self.algorithm.behaviour
        return nullcontext() if name is None else self.policy.using(name)

    def rescore(self, samples: Samples) -> tuple[Samples, dict[str, float]]:
        """The policy's own log-probabilities of samples that an engine with other kernels drew, or whose replay is
        known to differ; rollout/... metrics.
        """
        exact = self.rollout.exact and samples.exact and not self.progress.rescoring
        if exact or self.algorithm.levels is not None:
            return samples, {}
        config = self.cfg.rollout
        if self.rollout.exact:  # rollout.correction is of other engines
            config = replace(config, correction="rescore")
        with self.timers("rescore"):
            samples, row = rescore(self.policy, samples, config, self.plan.micro)
        return replace(samples, exact=True), row

    def guard(self, row: dict[str, float]) -> None:
        """Have the policy compute old log-probabilities again from now on, where its replay of exact samples is off by
        more than a tenth of the clip range: ratios would then be clipped by rounding and not by what was learned.
        """
        options, error = vars(self.cfg.algorithm), "actor/first_ratio_error"
        if self.progress.rescoring or not self.rollout.exact or "clip_ratio" not in options or error not in row:
            return
        if self.algorithm.levels is not None or row[error] <= options["clip_ratio"] / 10:
            return
        self.progress.rescoring = True
        if self.world.rank == 0:
            log.warning(
                "%s is %.1e, more than a tenth of algorithm.clip_ratio=%g: the policy's replay differs from the "
                "rollout, so from here on it computes the old log-probs again (time/rescore)",
                error,
                row[error],
                options["clip_ratio"],
            )

    # -- reward ---------------------------------------------------------------------------------------------------

    def reward(self, samples: Samples, step: int) -> tuple[Samples, Tensor, dict[str, float]]:
        """The rewards [N] of the samples of all ranks, zeros where there is no reward and NaN for samples that are to
        be skipped, and their metrics.

        Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal are drawn again, of
        new prompts or of the same ones, until they differ or the limit is reached; so the samples are returned as well.
        """
        if self.rewards is None:
            return samples, torch.zeros(self.plan.samples), {}
        with self.timers("reward"):  # what is left of it: the rest was scored while sampling went on
            terms = self.gather_terms()
        reward, redrawn, r = self.combine(terms, step), 0, self.cfg.rollout
        rows, limit = self.prompts.numbers(step), max(r.max_num_gen_batches, r.max_draws_per_prompt)
        for attempt in range(1, limit):
            stale = ~informative(without_gaps(reward, self.group_id), self.group_id)
            if not stale.any():
                break
            if r.max_num_gen_batches > 1:
                groups = self.group_id[stale].unique().tolist()
                rows = self.prompts.renewed(rows, groups, step * (limit - 1) + attempt - 1)
                with self.timers("encode"):
                    samples = self.rollout.renew(samples, self.prompts.prompts(rows))
            with self.timers("rollout"), self.behaviour(), self.rollout.awake():
                samples, numbers = self.rollout.resample(samples, stale, attempt, each=self.submit)
            self.ask()
            with self.timers("reward"):
                again, numbers = self.gather_terms(), all_gather(numbers)
            real = numbers >= 0
            terms = {name: values.index_copy(0, numbers[real], again[name][real]) for name, values in terms.items()}
            reward = self.combine(terms, step)
            redrawn += int(stale.sum())
        if redrawn > 0:
            samples, _ = self.rescore(samples)
        self._notice_flat(reward[~reward.isnan()], step)
        row = {"rollout/resampled_ratio": redrawn / self.plan.samples} if limit > 1 else {}
        return samples, reward, row | self.reward_metrics(reward, terms, step)

    def reward_metrics(self, reward: Tensor, terms: dict[str, Tensor], step: int) -> dict[str, float]:
        """reward/... of the samples that have a reward."""
        assert self.rewards is not None
        scored = ~reward.isnan()
        known = {name: values[scored] for name, values in terms.items()}
        row = reward_metrics(self.rewards.weighted(known, step), known, self.group_id[scored])
        return row | self.take_errors()

    def _notice_flat(self, reward: Tensor, step: int) -> None:
        """Say, once, where the reward [N] has been one and the same for all samples of many steps."""
        self._flat_steps = self._flat_steps + 1 if len(reward) and reward.max() == reward.min() else 0
        if self._flat_steps == FLAT_STEPS:
            log.warning(
                "the reward is %g for every sample of the last %d steps, up to step %d: there is nothing to learn from",
                reward.max(),
                FLAT_STEPS,
                step + 1,
            )

    def gather_terms(self) -> dict[str, Tensor]:
        """The terms of the reward [N], of all that the ranks submitted, in the order of ranks."""
        return {name: all_gather(values) for name, values in self.score()[1].items()}

    def combine(self, terms: dict[str, Tensor], step: int) -> Tensor:
        """The reward [N] that is trained, of its terms [N]; NaN for samples that lack one of them."""
        assert self.rewards is not None
        group_id = None if self.cfg.reward.normalize == "none" else self.group_id
        scored = ~torch.stack(list(terms.values())).isnan().any(0)
        if scored.all():
            return self.rewards.weighted(terms, step, group_id)
        reward = torch.full((self.plan.samples,), torch.nan)
        known = {name: values[scored] for name, values in terms.items()}
        reward[scored] = self.rewards.weighted(known, step, None if group_id is None else group_id[scored])
        return reward

    # -- update ---------------------------------------------------------------------------------------------------

    def update(self, samples: Samples, reward: Tensor, step: int) -> dict[str, float]:
        """All optimizer steps on the samples of training step `step`; reward [N] is that of all ranks' samples,
        NaN for those that are left out.
        """
        cfg, plan, algorithm, policy = self.cfg.actor, self.plan, self.algorithm, self.policy
        critic_epochs = 0 if self.critic is None else self.critic.epochs
        self.timers.expect((cfg.ppo_epochs + critic_epochs) * plan.updates * plan.passes)
        if not algorithm.needs_reward:  # it trains on samples without one, too
            reward = reward.nan_to_num(0.0)
        advantage = of_scored(algorithm.advantage, reward, self.group_id, 0.0)
        sample_mask = of_scored(algorithm.sample_mask, reward, self.group_id, False)
        numbers = algorithm.units(without_gaps(reward, self.group_id), self.group_id)
        units = Units.of(numbers, sample_mask, plan, self.world)
        mine = slice(self.world.rank * plan.per_rank, (self.world.rank + 1) * plan.per_rank)
        batches = MicroBatches(samples, advantage[mine], self.world.device)
        row: dict[str, float] = {}
        stats: list[list[dict[str, Any]]] = []  # of each optimizer step, of each micro-batch
        updates: list[dict[str, Any]] = []
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
            for parts in optimizer_steps(batches.mask, units, plan, self.world, mode=mode, constant=constant):
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
                    self.timers.advance()
                updates.append(self.step_optimizer(total))
        self._trained = sum(plan.first(len(micros)) for micros in stats)  # those skipped left out
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

    def corruption_seeds(self, samples: Samples, step: int, epoch: int) -> list[int]:
        """A seed for each sample of this rank, a function of (trainer.seed, step, sample, epoch)."""
        return [fold_in(self.cfg.trainer.seed, step, int(i), "forward", epoch) for i in samples.index]

    @torch.no_grad()
    def reference_outputs(self, batches: MicroBatches, units: Units) -> dict[str, Tensor]:
        """What the algorithm wants of other weights, about the samples of this rank's units: [B, ...] by name, with the
        samples in their places.
        """
        found = {}
        for name in self.algorithm.references:
            policy, theirs, weights = self._reference(name, batches)
            parts = []
            with weights, policy.unsharded():
                for part in units.mine.split(self.plan.micro_units):
                    batch = theirs.select(part.flatten(), torch.ones(len(part), batches.mask.shape[1]))
                    parts.append(self.algorithm.reference_output(policy, batch))
            outputs = torch.cat(parts)
            found[name] = outputs.new_zeros(self.plan.per_rank, *outputs.shape[1:])
            found[name][units.mine.flatten().to(outputs.device)] = outputs
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
            row["perf/mfu"] = self.step_flops(samples) / (seconds * self.world.size * peak)
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
