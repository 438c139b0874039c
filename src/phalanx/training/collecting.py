"""The half of reinforcement learning that makes samples with rewards: prompts, rollout, scores."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.config.run import RLConfig, TrainerConfig
from phalanx.data.streams import PromptStream
from phalanx.distributed.collectives import all_gather
from phalanx.functional.advantage import informative, without_gaps
from phalanx.training.batches import BatchPlan
from phalanx.training.scoring import Scoring
from phalanx.training.step_metrics import reward_metrics
from phalanx.types import Algorithm, Prompt, Samples

log = logging.getLogger(__name__)

FLAT_STEPS = 10  # without any difference between rewards, until it is said


@dataclass(frozen=True)
class Collected:
    """Samples of this rank, the reward [N] of those of all ranks, zeros where there is none and NaN for samples that
    are to be skipped, and metrics, equal on all ranks. `later`: the further parts of a step that is not drawn whole.
    """

    samples: Samples
    reward: Tensor
    row: dict[str, float]
    later: "Iterator[Collected] | None" = None


def steps_of(trainer: TrainerConfig, prompts: PromptStream) -> int:
    """Training steps of the whole run."""
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    assert trainer.total_epochs is not None
    return prompts.steps(trainer.total_epochs)


class Collecting(Scoring):
    """A rank that makes samples with rewards, with all ranks of its world.

    A step's prompts are sampled in `parts`, one after the other, which `plan` is of; `group_id` [N] numbers the prompts
    of all ranks' samples of a part.
    """

    cfg: RLConfig
    plan: BatchPlan
    algorithm: Algorithm
    prompts: PromptStream
    group_id: Tensor
    total_steps: int
    parts = 1
    _flat_steps = 0  # in a row, without any difference between rewards

    def collect(self, step: int, part: int = 0) -> Collected:
        """The samples of training step `step`, or of a part of it, with their rewards."""
        # Each rank draws its share; rewards score its micro-batches while it goes on.
        samples = self.sample(step, part)
        samples, mismatch = self.rescore(samples)
        # Over all ranks. Groups that would teach nothing can be drawn again.
        samples, reward, scores = self.reward(samples, step, part)
        row = self.rollout.metrics(samples, reward) | mismatch | scores
        if self.rewards is not None:  # on worker threads; time/reward is what was left to wait for
            row["perf/reward_busy_s"] = self.rewards.busy_s
            if self.rewards.judge_s is not None:
                row["perf/judge_busy_s"] = self.rewards.judge_s
        return Collected(samples, reward, row)

    def rows(self, unit: int) -> list[int]:
        """The rows of the data of a part's prompts; parts are numbered from the first step on."""
        step, part = divmod(unit, self.parts)
        count = self.plan.samples // self.cfg.rollout.n
        return self.prompts.numbers(step)[part * count : (part + 1) * count]

    def named(self, rows: list[int], unit: int) -> list[Prompt]:
        """The prompts of these rows, numbered within their step."""
        return self.prompts.prompts(rows, first=unit % self.parts * len(rows))

    def prompts_of(self, unit: int) -> list[Prompt]:
        """The prompts of a part, of all ranks."""
        return self.named(self.rows(unit), unit)

    def sample(self, step: int, part: int = 0) -> Samples:
        """This rank's samples of training step `step`, which are with the rewards when it returns."""
        seed, unit = self.cfg.trainer.seed, step * self.parts + part
        with self.timers("encode"):
            self.rollout.prepare(self.prompts_of, unit, self.total_steps * self.parts)
        with self.timers("rollout"), self.behaviour(), self.rollout.awake():
            self.timers.expect(-(-self.plan.per_rank // self.rollout.micro_batch_size))
            samples = self.rollout.sample(self.prompts_of(unit), seed=seed, step=step, each=self.submit)
        self.ask()
        return samples

    def behaviour(self) -> AbstractContextManager[None]:
        """The weights that sample for training."""
        name = self.algorithm.behaviour
        return nullcontext() if name is None else self.policy.using(name)

    def rescore(self, samples: Samples) -> tuple[Samples, dict[str, float]]:
        """The samples with old log-probabilities, where a rank that samples takes them; rollout/... metrics."""
        return samples, {}

    def reward(self, samples: Samples, step: int, part: int = 0) -> tuple[Samples, Tensor, dict[str, float]]:
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
        unit, limit = step * self.parts + part, max(r.max_num_gen_batches, r.max_draws_per_prompt)
        rows = self.rows(unit)
        for attempt in range(1, limit):
            stale = ~informative(without_gaps(reward, self.group_id), self.group_id)
            if not stale.any():
                break
            if r.max_num_gen_batches > 1:
                groups = self.group_id[stale].unique().tolist()
                rows = self.prompts.renewed(rows, groups, unit * (limit - 1) + attempt - 1)
                with self.timers("encode"):
                    samples = self.rollout.renew(samples, self.named(rows, unit))
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
