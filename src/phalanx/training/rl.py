"""The loop of reinforcement learning, once, for every algorithm and every kind of policy.

It knows samples, their actions and log-probabilities, rewards and advantages. What a sample is (a picture, a text) is
the business of the policy and the rollout that it is handed.
"""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.config.load import ConfigError
from phalanx.config.run import RLConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.roles import ACTOR, INFERENCE
from phalanx.rollout.correction import rescore
from phalanx.training.batches import BatchPlan
from phalanx.training.collecting import Collected, Collecting, steps_of
from phalanx.training.critic import CriticTrainer
from phalanx.training.in_parts import UpdatesInParts
from phalanx.training.parts import LoadedTeacher, Parts
from phalanx.training.roles import of_role
from phalanx.training.schedules import SCHEDULES, Synchronous
from phalanx.training.scoring import Records
from phalanx.types import Algorithm, Samples

log = logging.getLogger(__name__)


class Trainer(Collecting, UpdatesInParts):
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
        steps = steps_of(cfg.trainer, prompts)
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
        self.schedule: Synchronous | None = None
        if self.world.link is not None:
            make = SCHEDULES[cfg.rollout.schedule]
            part = of_role(plan, cfg, self.world.link.roles, ACTOR)
            self.schedule = make(cfg, part, self.world, self.policy, self.timers, algorithm.behaviour)

    def batch(self) -> str:
        updates = "update" if self.plan.updates == 1 else "updates"
        return f"{super().batch()} in {self.plan.updates} {updates}"

    def fit(self) -> None:
        """Train to the last step."""
        with self.logger:
            self.begin()
            for step in range(self.progress.step, self.total_steps):
                start = time.perf_counter()

                # Sample, and score the samples: see Collecting.collect.
                found = self.collect(step)

                # Advantage, then optimizer steps: replay, loss x weight, backward, step.
                with self.timers("update"):
                    found, row = self.learn(found, step)
                    self.guard(row)
                    if self.stepped:
                        self.after_step(step + 1)

                # Validate, log and save, each where it is due.
                row |= found.row | self.performance(found.samples, time.perf_counter() - start)
                self.progress.samples_seen += self.plan.samples
                del found
                self.end_step(step + 1, row)
            self.checkpointer.wait()

    def collect(self, step: int, part: int = 0) -> Collected:
        """The samples of a training step, from where they are drawn: here, or on ranks of their own."""
        if self.schedule is None:
            return super().collect(step, part)
        found = self.scored(self.schedule.collect(step))
        return replace(found, later=None if found.later is None else map(self.scored, found.later))

    def scored(self, found: Collected) -> Collected:
        """Samples from other ranks, with the policy's own log-probabilities where they lack these."""
        samples, row = self.rescore(found.samples)
        return replace(found, samples=samples, row=found.row | row)

    def rescore(self, samples: Samples) -> tuple[Samples, dict[str, float]]:
        """The policy's own log-probabilities of samples that an engine with other kernels drew, or whose replay is
        known to differ; rollout/... metrics.
        """
        # passes that are cut by tokens are scored again as they are trained, in `update`
        again = self.progress.rescoring and not self.plan.by_tokens
        if samples.on_policy or (self.rollout.exact and samples.exact and not again):
            return samples, {}
        link = self.world.link
        if link is not None and INFERENCE in link.roles.ranks:  # whose ranks have done it
            return samples, {}
        if self.algorithm.levels is not None:
            return samples, {}
        config = self.cfg.rollout
        old = samples.version is not None and not samples.exact
        if self.rollout.exact and not old:  # rollout.correction is of other engines, or of older weights
            config = replace(config, correction="rescore")
        with self.timers("rescore"):
            samples, row = rescore(self.policy, samples, config, self.plan.passes_of(1))
        return replace(samples, exact=True), row

    def begin(self) -> None:
        if self.schedule is not None:
            self.schedule.begin(self.progress.step, self.total_steps, self.kept)
        super().begin()

    def validated(self, weights: Callable[[], AbstractContextManager[None]]) -> tuple[dict[str, float], Records]:
        if self.schedule is None:
            return super().validated(weights)
        return self.schedule.validated(self.progress.step, None if self.learner.ema is None else "ema")

    def in_flight(self, step: int) -> Tensor | None:
        return None if self.schedule is None else self.schedule.in_flight(step)

    def release(self, stop: int = 0) -> None:
        if self.schedule is not None:
            self.schedule.end(stop)

    def guard(self, row: dict[str, float]) -> None:
        """Have the policy compute old log-probabilities again from now on, where its replay of exact samples is off by
        more than a tenth of the clip range: ratios would then be clipped by rounding and not by what was learned.
        """
        options, error = vars(self.cfg.algorithm), "actor/first_ratio_error"
        if self.progress.rescoring or "clip_ratio" not in options or error not in row:
            return
        if self.cfg.rollout.schedule == "one_step_off":  # where the weights themselves differ
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
