"""The loop of reinforcement learning, once, for every algorithm and every kind of policy.

It knows samples, their actions and log-probabilities, rewards and advantages. What a sample is (a picture, a text) is
the business of the policy and the rollout that it is handed.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.config.load import ConfigError
from phalanx.config.run import RLConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.collectives import all_gather
from phalanx.functional.advantage import informative, without_gaps
from phalanx.rollout.correction import rescore
from phalanx.training.batches import BatchPlan
from phalanx.training.critic import CriticTrainer
from phalanx.training.parts import LoadedTeacher, Parts
from phalanx.training.step_metrics import reward_metrics
from phalanx.training.updates import Updates
from phalanx.types import Algorithm, Samples

log = logging.getLogger(__name__)

FLAT_STEPS = 10  # without any difference between rewards, until it is said


class Trainer(Updates):
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
        # passes that are cut by tokens are scored again as they are trained, in `update`
        again = self.progress.rescoring and not self.plan.by_tokens
        if (self.rollout.exact and samples.exact and not again) or self.algorithm.levels is not None:
            return samples, {}
        config = self.cfg.rollout
        if self.rollout.exact:  # rollout.correction is of other engines
            config = replace(config, correction="rescore")
        with self.timers("rescore"):
            samples, row = rescore(self.policy, samples, config, self.plan.passes_of(1))
        return replace(samples, exact=True), row

    def guard(self, row: dict[str, float]) -> None:
        """Have the policy compute old log-probabilities again from now on, where its replay of exact samples is off by
        more than a tenth of the clip range: ratios would then be clipped by rounding and not by what was learned.
        """
        options, error = vars(self.cfg.algorithm), "actor/first_ratio_error"
        if self.progress.rescoring or "clip_ratio" not in options or error not in row:
            return
        if not self.rollout.exact and (not self.plan.by_tokens or self.cfg.rollout.correction == "none"):
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
            terms = self.gather_terms() | self.policy_terms(samples)
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
            drawn = {name: terms[name].index_copy(0, numbers[real], again[name][real]) for name in again}
            terms = drawn | self.policy_terms(samples)
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

    def policy_terms(self, samples: Samples) -> dict[str, Tensor]:
        """The terms of the reward [N] that the policy itself gives, of all ranks' samples."""
        assert self.rewards is not None
        found = self.rewards.of_policy(self.policy, samples, self.plan.passes_of(1))
        return {name: all_gather(values) for name, values in found.items()}

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
