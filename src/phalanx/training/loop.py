"""The loop of reinforcement learning, once, for every algorithm and every kind of policy.

It knows samples, their actions and log-probabilities, rewards and advantages. What a sample is (a picture, a text) is
the business of the policy and the rollout. Every rank runs it in step with all others.

Shapes: B samples of this rank, N of all ranks, A actions of a sample (denoising steps, tokens), b samples of a
micro-batch. A unit is what the loss counts as one: a sample, or a pair of them under DPO; u units of a micro-batch.
"""

import time
from typing import Protocol

from torch import Tensor

from phalanx.distributed.collectives import reduce_sum
from phalanx.functional.advantage import fill_missing, on_scored
from phalanx.training.job import Job
from phalanx.training.update import StepLog, Updater
from phalanx.types import Samples


class Collects(Protocol):
    """Samples with rewards: drawn here (phalanx.training.collect.Collector), or on other ranks
    (phalanx.training.disaggregated.schedules). The samples of a training step come in `chunks`, one after the other.
    """

    chunks: int

    def sample(self, step: int, chunk: int = 0) -> tuple[Samples, dict[str, float]]:
        """This rank's samples of a chunk of training step `step`, with old log-probabilities, and metrics."""

    def reward(self, samples: Samples, step: int, chunk: int = 0) -> tuple[Samples, Tensor, dict[str, float]]:
        """The samples, the rewards [N] of those of all ranks, NaN for samples to skip, and metrics."""


def train(job: Job, collector: Collects, updater: Updater) -> None:
    """Train to the last step.

    Raises JobError, on all ranks, for a failure that its message explains, and Stopped where a signal ended the job.
    """
    for step in job.steps():
        job.end_step(step + 1, train_step(job, collector, updater, step))


def train_step(
    job: Job, collector: Collects, updater: Updater, step: int, start: float | None = None
) -> dict[str, float]:
    """A training step of one policy: sample, score, learn. Returns its metrics.

    A job that trains several policies takes such a step for each before it ends the step of all; `start`, by
    time.perf_counter, is then such that the policy's own seconds have passed since.
    """
    policy, algorithm, critic = updater.policy, updater.algorithm, updater.critic
    state, timers = updater.state, updater.timers
    start, log = start or time.perf_counter(), StepLog()

    # All samples of the step at once, or in chunks that are trained while other ranks draw the next one.
    for chunk in range(collector.chunks):
        # n samples per prompt, from the weights as they are now; rewards score them meanwhile. Old log-probs are
        # exact where the policy's own modules sampled, else one more pass.
        samples, drawn = collector.sample(step, chunk)  # log_prob, mask [B, A]
        # One reward per sample, of all ranks; flat groups may be drawn again (DAPO).
        samples, reward, scores = collector.reward(samples, step, chunk)  # [N], NaN: skipped
        log.chunk(samples, drawn | scores)
        if log.stopped:  # behind an early stop, on its way already
            continue
        with timers("update"):
            timers.expect(updater.expected_passes)

            # A = (r - mean of the group) / std, and whether a sample counts: over the samples of all ranks.
            group_id = updater.group_id  # [N]
            if not algorithm.needs_reward:  # it trains on samples without one, too
                reward = fill_missing(reward, group_id)
            advantage = on_scored(algorithm.advantage, reward, group_id, 0.0)  # [N]
            counted = on_scored(algorithm.sample_mask, reward, group_id, False)  # [N] bool
            units = algorithm.units(fill_missing(reward, group_id), group_id)  # [U, samples of a unit]
            # B samples that this rank trains: its own or, where their costs differ, an equal share of the work.
            batch = updater.batches(samples, advantage, counted, units, log)
            if batch.learns and algorithm.levels is None:  # of the reference, of a teacher
                batch.reference_outputs = updater.reference_outputs(batch)  # [B, A, ...] by names of weights

            # PPO and its like: an advantage per action in place of one per sample.
            if batch.learns and algorithm.per_action:
                values = None if critic is None else critic.values(batch.samples)  # [B, A]
                scored = batch.scored(values)
                credit = algorithm.credit(scored, reduce_sum)
                batch.advantage = credit.advantage  # [B, A]
                log.rows[-1] |= credit.metrics
                if critic is not None and values is not None:
                    # Its own optimizer steps: L = max((V - R)^2, (clip(V) - R)^2) / 2 on the returns R [B, A].
                    log.rows[-1] |= critic.update(batch, scored.mask, values, credit.returns, timers.advance)

            # The samples in a few optimizer steps, once per epoch.
            for passes in updater.optimizer_steps(batch, log, step, chunk):
                scalars = log.begin_update()
                for i, (rows, weight) in enumerate(passes):
                    # gradients are summed across ranks with those of the last micro-batch, once
                    last = i == len(passes) - 1 and updater.ends_update(chunk)
                    policy.trained.sharded.set_last_micro_batch(last)
                    # Replay: the log-probs of the same actions under the weights as they are now, and each one's
                    # loss. The weight [u, A] holds the denominator over all ranks, and 0 for what does not count.
                    micro = batch.select(rows, weight)  # b samples
                    per_action, stats = algorithm.loss(policy, micro)  # [u, A]
                    loss = (per_action * micro.weight).sum()
                    loss.backward()
                    scalars.append(stats)
                    log.micro_batch(batch.samples, rows, loss.detach())
                    timers.advance()
                    del micro, per_action, loss  # before the next micro-batch takes their place
                if not updater.ends_update(chunk):  # more samples of this optimizer step are to come
                    continue
                if log.updates and updater.too_far(scalars):  # the step's other updates are left out
                    state.optimizer.drop_gradients()
                    log.stopped = True
                    break
                # Clip the norm of the gradient, step, follow with the EMA; NaN on any rank: skipped on all.
                log.updates.append(updater.apply(log.take_loss()))

    # The algorithm's other weights follow; metrics. The job then validates, logs and saves, each where it is due.
    row = log.metrics(updater.planned_updates)
    with timers("update"):
        updater.rescorer.check(row)
        if not state.diverged:
            updater.follow(step + 1)
    row |= updater.performance(samples, log, time.perf_counter() - start)
    job.progress.samples_seen += updater.plan.samples
    return row
