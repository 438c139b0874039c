"""Collect samples with rewards on the ranks that sample: prompts, rollout, old log-probabilities and scores."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from phalanx.config.run import RLConfig, TrainerConfig
from phalanx.distributed.collectives import all_gather, all_gather_rows
from phalanx.functional.advantage import check_range, fill_missing, has_signal
from phalanx.rewards import RewardSet
from phalanx.rewards.client import RewardClient
from phalanx.telemetry.step_metrics import reward_metrics
from phalanx.telemetry.timers import Timers
from phalanx.training.components import Tell, TrainedPolicy
from phalanx.training.minibatches import BatchPlan
from phalanx.training.rescorer import Rescorer
from phalanx.types import Collected, Prompt, Rollout, Samples


class PromptSource(Protocol):
    """The prompts of training steps, by row numbers of the data: phalanx.data.streams.PromptStream, or prompts that
    another policy writes. `ahead`: whether the prompts of later steps are already known.
    """

    ahead: bool

    def numbers(self, step: int) -> list[int]: ...
    def prompts(self, numbers: list[int], first: int = 0) -> list[Prompt]: ...
    def renewed(self, numbers: list[int], places: list[int], draw: int) -> list[int]: ...
    def steps(self, epochs: float) -> int: ...


def total_steps(trainer: TrainerConfig, prompts: PromptSource) -> int:
    """Number of training steps of the whole run."""
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    assert trainer.total_epochs is not None
    return prompts.steps(trainer.total_epochs)


class Collector:
    """Samples and scores, together with all ranks of its world.

    The prompts of a training step are sampled in `chunks` consecutive parts, each with the batch sizes of `plan`.
    weights: name of the weights that sample, None for the policy's own. rescorer: None if another role computes the old
    log-probabilities.
    """

    def __init__(
        self,
        cfg: RLConfig,
        plan: BatchPlan,
        policy: TrainedPolicy,
        rollout: Rollout,
        rewards: RewardClient,
        prompts: PromptSource,
        timers: Timers,
        *,
        weights: str | None = None,
        rescorer: Rescorer | None = None,
        chunks: int = 1,
        group: int | None = None,
        tell: Tell | None = None,
    ) -> None:
        """`group`: number of consecutive samples whose rewards are compared; None: the samples of a prompt. `tell`:
        gives each sample what a teacher reads beside its prompt; None: nothing that depends on the samples.
        """
        self.cfg, self.plan, self.policy = cfg, plan, policy
        self.rollout, self.rewards, self.prompts, self.timers = rollout, rewards, prompts, timers
        self.rescorer, self.chunks, self.tell = rescorer, chunks, tell
        # a context with the weights that sample for training
        self.behaviour = nullcontext if weights is None else partial(policy.using, weights)
        self.group_id = torch.arange(plan.samples) // (group or cfg.rollout.n)  # [N], for the samples of all ranks
        self.total_steps = total_steps(cfg.trainer, prompts)

    def sample(self, step: int, chunk: int = 0) -> tuple[Samples, dict[str, float]]:
        """Return this rank's samples of one chunk of training step `step`, with old log-probabilities, and rollout/...
        metrics. On return, all samples have been submitted to the reward functions.
        """
        seed, unit = self.cfg.trainer.seed, step * self.chunks + chunk
        with self.timers("encode"):
            end = self.total_steps * self.chunks if self.prompts.ahead else unit + 1
            self.rollout.prepare(self._chunk_prompts, unit, end)
        with self.timers("rollout"), self.behaviour(), self.rollout.awake():
            self.timers.expect(-(-self.plan.per_rank // self.rollout.micro_batch_size))
            samples = self.rollout.sample(self._chunk_prompts(unit), seed=seed, step=step, each=self.rewards.submit)
        if self.rewards.has_judges:
            self.rewards.ask()
        return (samples, {}) if self.rescorer is None else self.rescorer(samples)

    def reward(self, samples: Samples, step: int, chunk: int = 0) -> tuple[Samples, Tensor, dict[str, float]]:
        """Return the samples, the rewards [N] of all ranks' samples (all zeros without reward functions, NaN for
        samples to skip), and metrics. Samples that dynamic sampling has redrawn are included.
        """
        reward_set = self.rewards.reward_set
        if reward_set is None:
            reward = torch.zeros(self.plan.samples)
            samples = samples if self.tell is None else self.tell(samples, reward, [])
            return samples, reward, self.rollout.metrics(samples, reward)
        with self.timers("reward"):  # only waits for the last scores: most were computed during sampling
            terms = self._gather_terms()
            if reward_set.of_policies:
                terms |= self._policy_terms(reward_set, samples)
        feedback = [] if self.tell is None else self._gather_feedback()
        reward, redrawn = self._combine_terms(reward_set, terms, step, samples), dict[str, float]()
        limit = max(self.cfg.rollout.max_num_gen_batches, self.cfg.rollout.max_draws_per_prompt)
        if limit > 1:
            samples, reward, terms, redrawn = self._redraw_equal(samples, reward, terms, feedback, step, chunk, limit)
        if self.tell is not None:
            with self.timers("encode"):
                samples = self.tell(samples, reward, feedback)
        # rewards of single actions are part of the weighted sum, but not of normalised scores
        if samples.action_reward is not None:
            weight = 0.0 if self.cfg.reward.normalize != "none" else reward_set.turn_weight(step)
            samples = replace(samples, action_reward=samples.action_reward * weight)
        row = self.rollout.metrics(samples, reward) | self.rewards.metrics | redrawn
        scored = ~reward.isnan()
        known = {name: values[scored] for name, values in terms.items()}
        row |= reward_metrics(reward_set.weighted(known, step), known, self.group_id[scored])
        if self.rewards.forgives:
            row |= self.rewards.take_errors()
        return samples, reward, row

    def _redraw_equal(
        self,
        samples: Samples,
        reward: Tensor,
        terms: dict[str, Tensor],
        feedback: list[str],
        step: int,
        chunk: int,
        limit: int,
    ) -> tuple[Samples, Tensor, dict[str, Tensor], dict[str, float]]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): resample groups whose rewards [N] are all equal, with
        new prompts or the same ones, until the rewards differ or there are `limit` draws. Returns the samples, the
        rewards, their terms, and metrics; replaces the feedback in place.
        """
        reward_set, redrawn, unit = self.rewards.rewards, 0, step * self.chunks + chunk
        rows = self._chunk_rows(unit)
        for attempt in range(1, limit):
            stale = ~has_signal(fill_missing(reward, self.group_id), self.group_id)
            if not stale.any():
                break
            if self.cfg.rollout.max_num_gen_batches > 1:
                groups = self.group_id[stale].unique().tolist()
                rows = self.prompts.renewed(rows, groups, unit * (limit - 1) + attempt - 1)
                with self.timers("encode"):
                    samples = self.rollout.renew(samples, self._chunk_prompts(unit, rows))
            with self.timers("rollout"), self.behaviour(), self.rollout.awake():
                samples, numbers = self.rollout.resample(samples, stale, attempt, each=self.rewards.submit)
            if self.rewards.has_judges:
                self.rewards.ask()
            with self.timers("reward"):
                again, numbers = self._gather_terms(), all_gather(numbers)
            real = numbers >= 0
            texts = [] if self.tell is None else self._gather_feedback()
            for number, text in zip(numbers.tolist(), texts, strict=False):
                if number >= 0:
                    feedback[number] = text
            terms = {name: terms[name].index_copy(0, numbers[real], again[name][real]) for name in again}
            if reward_set.of_policies:
                terms |= self._policy_terms(reward_set, samples)
            reward = self._combine_terms(reward_set, terms, step, samples)
            redrawn += int(stale.sum())
        if redrawn > 0 and self.rescorer is not None:
            samples, _ = self.rescorer(samples)
        return samples, reward, terms, {"rollout/resampled_ratio": redrawn / self.plan.samples}

    def collect(self, step: int, chunk: int = 0) -> Collected:
        """Call `sample` and `reward`."""
        samples, drawn = self.sample(step, chunk)
        samples, reward, scores = self.reward(samples, step, chunk)
        return Collected(samples, reward, drawn | scores)

    def _chunk_rows(self, unit: int) -> list[int]:
        """The data rows of a chunk's prompts. unit: number of the chunk, counted from the first training step."""
        step, chunk = divmod(unit, self.chunks)
        count = self.plan.samples // self.cfg.rollout.n
        return self.prompts.numbers(step)[chunk * count : (chunk + 1) * count]

    def _chunk_prompts(self, unit: int, rows: list[int] | None = None) -> list[Prompt]:
        """The prompts of a chunk, for all ranks, or of other `rows`; group ids count within their training step."""
        rows = self._chunk_rows(unit) if rows is None else rows
        return self.prompts.prompts(rows, first=unit % self.chunks * len(rows))

    def _gather_terms(self) -> dict[str, Tensor]:
        """The terms of the reward, each [N], of the samples that all ranks submitted, in the order of ranks."""
        return {name: all_gather(values) for name, values in self.rewards.collect().items()}

    def _gather_feedback(self) -> list[str]:
        """The texts of rewards about the samples that all ranks submitted, in the order of ranks; empty for none."""
        return list(chain(*all_gather_rows(self.rewards.feedback)))

    def _policy_terms(self, reward_set: RewardSet, samples: Samples) -> dict[str, Tensor]:
        """The terms of the reward, each [N], that the policy itself computes, for all ranks' samples."""
        terms = reward_set.of_policy(self.policy, samples, self.plan.passes_of(1))
        return {name: all_gather(values) for name, values in terms.items()}

    def _combine_terms(self, reward_set: RewardSet, terms: dict[str, Tensor], step: int, samples: Samples) -> Tensor:
        """The reward [N] for training from its terms [N]; NaN for samples that lack a term or are lost."""
        group_id = None if self.cfg.reward.normalize == "none" else self.group_id
        scored = ~torch.stack(list(terms.values())).isnan().any(0)
        if samples.lost is not None:
            scored &= ~all_gather(samples.lost)
        if scored.all():
            return check_range(reward_set.weighted(terms, step, group_id))
        reward = torch.full((self.plan.samples,), torch.nan)
        known = {name: values[scored] for name, values in terms.items()}
        reward[scored] = reward_set.weighted(known, step, None if group_id is None else group_id[scored])
        return check_range(reward)
