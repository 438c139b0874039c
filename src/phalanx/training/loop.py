"""The training loop of reinforcement learning, shared by all algorithms and all kinds of policy.

The loop handles samples, their actions and log-probabilities, rewards and advantages; only the policy and the rollout
know whether a sample is an image or a text. All ranks run the loop in lockstep.

Shapes: B samples on this rank, N samples on all ranks, A actions per sample (denoising steps or tokens), b samples per
micro-batch, u units per micro-batch. A unit is one term of the loss: a sample, or a pair of samples for DPO.
"""

import time
from functools import partial
from typing import Protocol

from torch import Tensor

from phalanx.distributed.collectives import reduce_sum
from phalanx.functional.advantage import fill_missing, on_scored
from phalanx.training.components import Job
from phalanx.training.update import StepLog, Updater
from phalanx.types import Samples


class Collects(Protocol):
    """The source of samples with rewards: this rank (phalanx.training.collect.Collector) or ranks of other roles
    (phalanx.run.disaggregated.schedules). The samples of a training step arrive in `chunks` consecutive parts.
    """

    chunks: int

    def sample(self, step: int, chunk: int = 0) -> tuple[Samples, dict[str, float]]:
        """Return this rank's samples of one chunk of training step `step`, with old log-probabilities, and metrics."""

    def reward(self, samples: Samples, step: int, chunk: int = 0) -> tuple[Samples, Tensor, dict[str, float]]:
        """Return the samples, the rewards [N] of all ranks' samples (NaN: skip the sample), and metrics."""


def train(job: Job, collector: Collects, updater: Updater) -> None:
    """Train to the last step.

    Raises JobError on all ranks for a failure that the message explains, and Stopped if a signal ended the job.
    """
    for step in job.steps():
        job.end_step(step + 1, train_step(job, collector, updater, step))


def train_step(
    job: Job, collector: Collects, updater: Updater, step: int, start: float | None = None
) -> dict[str, float]:
    """Run one training step of one policy (sample, score, learn) and return its metrics.

    A job that trains several policies calls this once per policy before it ends the common step. It then passes a
    `start` (time.perf_counter) from which only the seconds spent on this policy are counted.
    """
    policy, algorithm, critic = updater.policy, updater.algorithm, updater.critic
    state, timers = updater.state, updater.timers
    start, log = start or time.perf_counter(), StepLog()
    micro_batch_done = partial(job.stops.after_micro_batch, timers)  # a signal may end the step there

    # One chunk with all samples of the step, or several, each trained while other ranks sample the next one.
    for chunk in range(collector.chunks):
        # Sample n responses or images per prompt with the current weights; reward functions score them meanwhile. Old
        # log-probs are exact if the policy's own modules sampled, otherwise they take one more forward pass.
        samples, drawn = collector.sample(step, chunk)  # log_prob, mask [B, A]
        # One reward per sample, over all ranks; groups of equal rewards may be resampled (DAPO).
        samples, reward, scores = collector.reward(samples, step, chunk)  # [N], NaN: skipped
        log.chunk(samples, reward, drawn | scores)
        if log.stopped:  # this chunk was already under way when the step stopped early
            continue
        with timers("update"):
            timers.expect(updater.expected_passes)

            # A = (r - mean of the group) / std, and which samples count, computed over the samples of all ranks.
            group_id = updater.group_id  # [N]
            if not algorithm.needs_reward:  # the algorithm also trains on samples without a reward
                reward = fill_missing(reward, group_id)
            advantage = on_scored(algorithm.advantage, reward, group_id, 0.0)  # [N]
            counted = on_scored(algorithm.sample_mask, reward, group_id, False)  # [N] bool
            units = algorithm.units(fill_missing(reward, group_id), group_id)  # [U, samples per unit]
            # The B samples this rank trains: those it sampled or, if their costs differ, an equal share of the work.
            batch = updater.batches(samples, advantage, counted, units, log)
            if batch.learns and algorithm.references and algorithm.levels is None:
                # outputs of the reference model and of teachers
                batch.reference_outputs = updater.reference_outputs(batch)  # name of the weights -> [B, A, ...]

            # PPO and similar algorithms: one advantage per action instead of one per sample.
            if batch.learns and algorithm.per_action:
                values = None if critic is None else critic.values(batch.samples)  # [B, A]
                scored = batch.scored(values)
                credit = algorithm.credit(scored, reduce_sum)
                batch.advantage = credit.advantage  # [B, A]
                log.rows[-1] |= credit.metrics
                if critic is not None and values is not None:
                    # The critic's optimizer steps: L = max((V - R)^2, (clip(V) - R)^2) / 2 on the returns R [B, A].
                    log.rows[-1] |= critic.update(batch, scored.mask, values, credit.returns, micro_batch_done)

            # Each epoch trains the samples in a few optimizer steps.
            for passes in updater.optimizer_steps(batch, step):
                scalars = log.begin_update()
                for i, (rows, weight) in enumerate(passes):
                    # gradients are reduced across ranks only once, in the backward pass of the last micro-batch
                    last = i == len(passes) - 1 and updater.ends_update(chunk)
                    policy.trained.sharded.set_last_micro_batch(last)
                    # Replay: log-probs of the same actions under the current weights, and the loss of each action.
                    # The weight [u, A] includes the denominator over all ranks; it is 0 for actions that do not count.
                    micro = batch.select(rows, weight)  # b samples
                    per_action, stats = algorithm.loss(policy, micro)  # [u, A]
                    scalars.add(stats, micro.weight)
                    del stats  # metrics may hold activations that the backward pass does not need
                    loss = (per_action * micro.weight).sum()
                    policy.trained.backward(loss)
                    log.micro_batch(batch.samples, rows, loss.detach())
                    micro_batch_done()
                    del micro, per_action, loss  # free the memory before the next micro-batch
                if not updater.ends_update(chunk):  # later chunks contribute to the same optimizer step
                    continue
                if log.updates and updater.too_far(scalars):  # skip the remaining updates of this training step
                    state.optimizer.drop_gradients()
                    log.stopped = True
                    break
                # Clip the gradient norm, step, update the EMA; all ranks skip the update if any has NaN.
                log.updates.append(updater.apply(log.take_loss()))

    # Update the algorithm's averaged weights and gather metrics; the job then validates, logs and saves if due.
    row = log.metrics(updater.planned_updates)
    with timers("update"):
        updater.rescorer.check(row)
        if not state.diverged:
            updater.follow(step + 1)
    row |= updater.performance(samples, log, time.perf_counter() - start)
    job.progress.samples_seen += updater.plan.samples
    return row
