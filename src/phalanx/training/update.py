"""Optimizer steps on collected samples: reference outputs, corruption, early stopping, and metrics of a step."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.config.run import RLConfig
from phalanx.distributed.collectives import all_gather, reduce_float, reduce_int, reduce_sum
from phalanx.distributed.mesh import World
from phalanx.distributed.seed import fold_in
from phalanx.functional.aggregation import Sums
from phalanx.telemetry.flops import peak_flops
from phalanx.telemetry.step_metrics import merged_rows, peak_memory_gb, token_metrics, update_metrics
from phalanx.telemetry.timers import Timers
from phalanx.training.components import LoadedTeacher, TrainedPolicy
from phalanx.training.critic_trainer import CriticTrainer
from phalanx.training.exchange import exchanged
from phalanx.training.minibatches import BatchPlan, Minibatches, Units, optimizer_steps
from phalanx.training.optim import TrainState
from phalanx.training.rescorer import Rescorer
from phalanx.types import ASKED, TEACHER, Algorithm, Policy, Prompt, Samples

Pass = tuple[Tensor, Tensor]  # rows [b] of this rank's samples, and the weights [u, A] of their units' actions


@dataclass
class StepLog:
    """Numbers of one training step on this rank.

    rows: metrics of each chunk. scored: samples of all ranks with a reward, of each chunk. lengths: `Samples.lengths`
    [B, 3] of each chunk, for samples made of tokens. scalars: sums of the loss's metrics, by optimizer step. updates:
    what each optimizer step returned. trained and trained_tokens: samples and tokens that were trained, counted once
    per epoch.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    scalars: list[Sums] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    trained: int = 0
    trained_tokens: int = 0
    loss: Tensor | float = 0.0  # of the optimizer step whose gradients are being accumulated
    stopped: bool = False  # whether the remaining updates of the step are skipped

    def chunk(self, samples: Samples, reward: Tensor, row: dict[str, float]) -> None:
        """Record the metrics `row` of a chunk of samples that has arrived; reward [N]: NaN without one."""
        self.rows.append(row)
        self.scored.append(int((~reward.isnan()).sum()))
        if samples.lengths is not None:
            self.lengths.append(samples.lengths)

    def begin_update(self) -> Sums:
        """Return the sums of the current optimizer step; they are new if the previous step was taken."""
        if len(self.scalars) == len(self.updates):
            self.scalars.append(Sums(first=not self.updates))
        return self.scalars[-1]

    def micro_batch(self, samples: Samples, rows: Tensor, loss: Tensor) -> None:
        """Record a forward and backward pass over the samples `rows` [b] of this rank."""
        self.loss += loss
        self.trained += len(rows)
        if samples.tokens is not None:
            self.trained_tokens += int(samples.tokens[rows].sum())

    def take_loss(self) -> Tensor:
        """Return this rank's loss since the last optimizer step, and reset it."""
        loss, self.loss = self.loss, 0.0
        assert isinstance(loss, Tensor), "each optimizer step has at least one micro-batch"
        return loss

    def metrics(self, planned: int) -> dict[str, float]:
        """Metrics of the step, reduced over all ranks. planned: number of optimizer steps without early stopping."""
        [row, *more] = self.rows
        row = merged_rows(self.rows, self.scored) if more else dict(zip(row, map(float, row.values()), strict=True))
        return row | update_metrics("actor", self.scalars, self.updates, planned)


class Updater:
    """Everything around the loop of forward and backward passes: batches, reference outputs, optimizer steps, metrics.

    plan: numbers of a whole training step; `chunk_plan` has those of each of its `chunks`. teachers: the algorithm's
    teachers, loaded. critic: the value model, if the algorithm uses one. costs: returns the training cost of each of
    this rank's samples, by which ranks exchange samples to balance the work; None: each rank trains its own samples.
    """

    def __init__(
        self,
        cfg: RLConfig,
        plan: BatchPlan,
        algorithm: Algorithm,
        policy: TrainedPolicy,
        world: World,
        state: TrainState,
        rescorer: Rescorer,
        timers: Timers,
        *,
        teachers: Mapping[str, LoadedTeacher] | None = None,
        critic: CriticTrainer | None = None,
        chunks: int = 1,
        noun: str = "samples",
        costs: Callable[[Samples], list[float]] | None = None,
        group: int | None = None,
        score: Callable[..., Tensor] | None = None,
    ) -> None:
        """`group`: see phalanx.training.collect.Collector. `score`: RewardSet.with_gradient if the algorithm
        differentiates the reward.
        """
        self.cfg, self.plan, self.algorithm, self.policy, self.world = cfg, plan, algorithm, policy, world
        self.state, self.rescorer, self.timers, self.noun = state, rescorer, timers, noun
        self.teachers, self.critic, self.chunks, self.costs = dict(teachers or {}), critic, chunks, costs
        self.score, self.chunk_plan = score, plan
        self.routed = [teacher.name for teacher in algorithm.teachers if teacher.rows is not None]
        self.routed += [name for name, teacher in self.teachers.items() if teacher.told]
        if chunks > 1:
            samples, per_rank = plan.samples // chunks, plan.per_rank // chunks
            self.chunk_plan = replace(plan, samples=samples, per_rank=per_rank, units=per_rank, updates=1)
        # sample i, numbered across all ranks, belongs to prompt i // n
        self.group_id = torch.arange(self.chunk_plan.samples) // (group or cfg.rollout.n)  # [N]
        self.planned_updates = plan.updates * plan.epochs
        self.peak_flops = peak_flops(world.device, policy.trained.dtype)
        self._counts = torch.zeros(2, dtype=torch.int64)  # trained actions and samples of the optimizer step
        # forward and backward passes of a training step if all samples count; 0 if not known in advance
        epochs = plan.epochs + (0 if critic is None else critic.epochs)
        self.expected_passes = 0 if plan.budget is not None or chunks > 1 else epochs * plan.updates * plan.passes

    # -- balancing of ranks ---------------------------------------------------------------------------------------

    def batches(self, samples: Samples, advantage: Tensor, counted: Tensor, units: Tensor, log: StepLog) -> Minibatches:
        """Build the Minibatches this rank trains; with `costs`, ranks first exchange samples to balance the work."""
        whole_groups = self.algorithm.samples_per_unit == 0  # which are trained without samples that do not count
        divided = Units.of(units, counted, samples.index, self.world, partial=whole_groups)
        if self.costs is not None and self.world.data_size > 1 and counted[units].any():
            ranks = self._balanced_ranks(self.costs(samples), samples, divided, units, log)
            if not ranks.equal(divided.ranks):
                of_samples = torch.full((len(counted),), -1)
                of_samples[units] = ranks[:, None].expand(units.shape)
                samples = exchanged(samples, of_samples, self.world)
                divided = Units.of(units, counted, samples.index, self.world, ranks, partial=whole_groups)
        # groups span ranks, so advantages are computed for all ranks' samples [N]; this rank needs its own [B]
        of_rank, corrects = advantage[samples.index], self.algorithm.corrects
        begun = len(log.scalars) > len(log.updates)  # whether earlier chunks have contributed to an optimizer step
        if not begun:
            self._counts.zero_()
        # gradients are reduced in the last pass of an optimizer step, so its last chunk needs at least one pass
        pending = begun and self.ends_update(len(log.rows) - 1)
        known = counted[samples.index] if whole_groups else None
        place = self.world.device
        return Minibatches(samples, of_rank, divided, place, corrects=corrects, pending=pending, counted=known)

    def _balanced_ranks(
        self, costs: list[float], samples: Samples, divided: Units, units: Tensor, log: StepLog
    ) -> Tensor:
        """[U] which rank trains each unit, given the costs of this rank's samples."""
        assert samples.tokens is not None, "samples that differ in cost have tokens"
        size = self.world.data_size
        local = torch.stack([torch.tensor(costs, dtype=torch.float64), samples.tokens.double()], 1)
        of_units, tokens = all_gather(local)[units].sum(1).T  # [U] each, over all ranks
        trained = torch.zeros(size, dtype=torch.float64).index_add(0, divided.ranks, tokens * divided.counted)
        log.rows[-1]["perf/token_imbalance_drawn"] = float(trained.max() / trained.mean().clamp(min=1))
        # all ranks know all costs, so each of them computes the same assignment of units to ranks
        return divided.balanced(of_units, self.chunk_plan.updates, size)

    # -- optimizer steps ------------------------------------------------------------------------------------------

    def optimizer_steps(self, batch: Minibatches, step: int) -> Iterator[list[Pass]]:
        """Yield the passes of each optimizer step on a chunk of samples, epoch by epoch. Algorithms with `levels` train
        on freshly corrupted samples in each epoch.

        All ranks run the same number of passes; optimizer steps without any sample to train are skipped.
        """
        warming_up = self.critic is not None and step < self.critic.warmup  # only the critic is trained
        for epoch in range(self.plan.epochs if batch.learns and not warming_up else 0):
            if self.algorithm.levels is not None:
                self._corrupt(batch, step, epoch)
            if self.chunks > 1:  # the passes are those of this chunk in one step
                self._counts += batch.counts
            steps = optimizer_steps(
                batch.mask,
                batch.units,
                self.chunk_plan,
                self.world,
                mode=self.cfg.actor.loss_agg_mode,
                constant=self.cfg.actor.loss_scale_factor,
                tokens=batch.samples.tokens,
                summed=self.chunks > 1,
                at_least_one=batch.pending,
            )
            # compute log pi_old in the same passes as the training if their shapes depend on the samples in them
            if epoch == 0 and self.rescorer.in_training and not batch.samples.on_policy:
                batch.samples = self.rescorer.in_passes(batch.samples, [rows for passes in steps for rows, _ in passes])
            yield from steps

    def _corrupt(self, batch: Minibatches, step: int, epoch: int) -> None:
        """Forward process: x_t = (1 - t) x_0 + t noise; each epoch draws its own noise and t [B, W]."""
        seed = self.cfg.trainer.seed
        seeds = [fold_in(seed, step, int(i), "forward", epoch) for i in batch.samples.index]
        batch.corrupted = self.algorithm.corrupt(self.policy, batch.samples, seeds)
        if self.score is not None:
            batch.score = partial(self.score, step=step)
        batch.reference_outputs = self.reference_outputs(batch)

    def ends_update(self, chunk: int) -> bool:
        """Whether an optimizer step follows the passes of this chunk."""
        return (chunk + 1) % max(self.chunks // self.plan.updates, 1) == 0

    def apply(self, loss: Tensor) -> dict[str, float | Tensor]:
        """Take the optimizer step on the accumulated gradients; `loss` is this rank's sum over its passes."""
        if self.chunks > 1:
            # The chunks accumulated the gradient of sum(l). T and S over all of them are only known now; dividing by
            # T or S gives the gradient of the mean.
            actions, samples = reduce_sum(self._counts).tolist()
            denominator = max(actions if self.cfg.actor.loss_agg_mode == "token-mean" else samples, 1)
            self.state.optimizer.scale_gradients(1 / denominator)
            loss = loss / denominator
        return self.state.step(loss)

    def too_far(self, scalars: Sums) -> bool:
        """Whether the mean ratio of an update, over all that counts, exceeds the algorithm's `max_ratio`."""
        limit = self.algorithm.max_ratio
        if limit is None or "ratio_mean" not in scalars.parts:
            return False
        count, total = reduce_sum(scalars.parts["ratio_mean"].cpu()).tolist()
        return total > limit * count

    # -- other weights --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reference_outputs(self, batch: Minibatches) -> dict[str, Tensor]:
        """The outputs [B, ...] of other weights for this rank's samples, by name, as far as the algorithm needs them.

        Rows are in the order of the samples; samples that are not part of this rank's units have zeros.
        """
        outputs: dict[str, Tensor] = {}
        passes = self.plan.passes_of(self.plan.together)
        for name in self.algorithm.references:
            units, real_units = self._reference_units(name, batch, passes.micro)
            if not len(units):  # this holds on all ranks or on none
                continue
            policy, inputs, weights = self.reference(name, batch)
            results, tokens = [], inputs.samples.tokens  # a teacher may read longer prompts
            cut = passes.parts(len(units), None if tokens is None else tokens[units])
            with weights, policy.unsharded():
                for part in cut:
                    rows = units[part].flatten()
                    micro = inputs.select(rows, torch.ones(len(part), batch.mask.shape[1]))
                    results.append(self.algorithm.reference_output(policy, micro))
                    self.rescorer.between()
            joined, order = torch.cat(results), torch.cat(cut)
            places = units[order].flatten()
            if real_units < len(units):  # drop the units that only filled up the passes
                real = (order < real_units).repeat_interleave(units.shape[1]).nonzero().flatten()
                joined, places = joined[real.to(joined.device)], places[real]
            # from the order of the passes back to the order of the samples [B, A, ...]
            key = TEACHER if name in self.routed else name
            if key not in outputs:
                outputs[key] = joined.new_zeros(len(batch.advantage), *joined.shape[1:])
            outputs[key][places.to(joined.device)] = joined
            if name in self.routed:
                asked_of = outputs.setdefault(ASKED, torch.full((len(batch.advantage),), -1, device=joined.device))
                asked_of[places.to(joined.device)] = self.routed.index(name)
        return outputs

    def asks(self, name: str, prompt: Prompt) -> bool:
        """Whether the algorithm needs the outputs of the weights `name` for the samples of a prompt."""
        if name in self.teachers and self.teachers[name].told:
            return bool(prompt.told)
        return name not in self.routed or prompt.teacher == name

    def _reference_units(self, name: str, batch: Minibatches, micro: int) -> tuple[Tensor, int]:
        """This rank's units [u, s] for the passes with the weights `name`, and how many of them, at the front, need an
        output. The others fill up the passes: with sharded weights all ranks must run the same number.
        """
        local = batch.units.local
        if name not in self.routed:
            return local, len(local)
        # all samples of a unit belong to the same prompt
        prompts = batch.samples.prompts
        chosen = local[torch.tensor([self.asks(name, prompts[place]) for place in local[:, 0].tolist()])]
        most = reduce_int(len(chosen), "max")
        # whole passes, so that their shape does not depend on which prompts a step has
        padded = min(math.ceil(most / micro) * micro, len(local))
        filler = local[:1].expand(padded - len(chosen), -1)
        return torch.cat([chosen, filler]), len(chosen)

    def reference(self, name: str, batch: Minibatches) -> tuple[Policy, Minibatches, AbstractContextManager[Any]]:
        """The policy that computes the outputs `name`, the samples as its inputs, and a context with its weights."""
        if name in self.teachers:
            teacher = self.teachers[name]
            weights = self.policy.using(name) if teacher.policy is self.policy else nullcontext()
            return teacher.policy, replace(batch, samples=teacher.samples(batch.samples)), weights
        return self.policy, batch, nullcontext() if name == "policy" else self.policy.using(name)

    def follow(self, step: int) -> None:
        """Update the algorithm's averaged weights after training step number `step` (from 1)."""
        averages = self.state.averages
        if averages:
            self.state.keep()
            self.state.changed = True
        # theta_old <- d theta_old + (1 - d) theta
        for name in self.algorithm.averages:
            averages[name].update(self.algorithm.decay(name, step))
        sync = self.cfg.actor.ref_model_sync_steps
        if sync is not None and step % sync == 0 and "reference" in averages:
            averages["reference"].update(0.0)  # decay 0: a copy of the policy

    # -- performance ----------------------------------------------------------------------------------------------

    def performance(self, samples: Samples, log: StepLog, seconds: float) -> dict[str, float]:
        """Throughput, utilisation and memory of a training step that took `seconds`; `samples` are of one chunk."""
        link = self.world.link
        ranks = self.world.size if link is None else link.world_size
        row = {
            "perf/step_s": seconds,
            f"perf/{self.noun}_per_gpu_per_s": self.plan.samples / ranks / seconds,
            "perf/peak_memory_gb": reduce_float(peak_memory_gb(self.world.device), "max"),
        }
        if link is not None:
            row["idle/actor"] = self.timers.seconds("wait") / seconds
        if self.peak_flops is not None:
            # each rank counts its own samples; the mean over ranks is the result
            local = [float(self.step_flops(samples, log.trained, recomputed=again)) for again in (False, True)]
            flops = reduce_sum(torch.tensor(local, dtype=torch.float64)) / self.world.data_size
            used = flops / (seconds * ranks * self.peak_flops)
            # datasheets have no peak for CPUs: `peak_flops` measures a rate, and these are fractions of it
            measured = "cpu_" if self.world.device.type == "cpu" else ""
            row[f"perf/{measured}mfu"], row[f"perf/{measured}hfu"] = used.tolist()
        self.timers.note_rate(self.plan.per_rank / seconds, self.noun)
        if log.lengths:
            lengths = torch.cat(log.lengths)
            self.timers.note_rate(int(lengths[:, :2].sum()) / seconds, "tokens")
            row |= token_metrics(lengths, log.trained_tokens, seconds, self.timers, ranks)
        return row

    def step_flops(self, samples: Samples, trained: int, *, recomputed: bool) -> int:
        """Floating-point operations of a training step on all ranks. trained: samples trained on this rank. recomputed:
        include what gradient checkpointing computes again.
        """
        plan = self.plan
        cost = 0.0  # of the references, per sample, in units of a forward pass of the policy
        for name in self.algorithm.references:
            share = sum(self.asks(name, prompt) for prompt in samples.prompts) / len(samples.prompts)
            cost += share * (self.teachers[name].relative_cost(samples) if name in self.teachers else 1.0)
        if self.critic is not None:
            cost += self.critic.relative_cost(self.policy.trained)
        references = cost * plan.reference_samples / plan.per_rank if trained > 0 else 0.0
        # sampling, references, and per trained sample 3 times the forward pass (4 times with recomputation)
        return self.policy.step_flops(
            samples,
            actions=self.algorithm.levels or samples.mask.shape[1],
            count=plan.samples,
            updates=trained / plan.per_rank,
            references=references,
            recomputed=recomputed,
        )
