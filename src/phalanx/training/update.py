"""Optimizer steps on collected samples: reference outputs, fresh noise, early stops, and the metrics of a step."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from phalanx.telemetry.flops import peak_flops
from phalanx.telemetry.metrics import Timers
from phalanx.telemetry.step_metrics import merged_rows, peak_memory_gb, token_metrics, update_metrics
from phalanx.training.collect import Rescorer
from phalanx.training.components import LoadedTeacher, TrainedPolicy
from phalanx.training.critic import CriticTrainer
from phalanx.training.disaggregated.wire import exchanged
from phalanx.training.minibatches import BatchPlan, Minibatches, Units, optimizer_steps
from phalanx.training.optim import TrainState
from phalanx.types import ASKED, TEACHER, Algorithm, Policy, Prompt, Samples

Pass = tuple[Tensor, Tensor]  # rows [b] of this rank's samples, and the weights [u, A] of the actions of their units


@dataclass
class StepLog:
    """The numbers of a training step on this rank: `rows` of metrics of its chunks, `scalars` of the loss for each
    optimizer step and micro-batch, what each optimizer step returned (`updates`), and the samples and tokens that were
    trained, counted each time. `lengths` [B, 3] are those of the chunks' samples, where these are made of tokens.
    """

    rows: list[dict[str, float]] = field(default_factory=list)
    lengths: list[Tensor] = field(default_factory=list)
    scalars: list[list[dict[str, Any]]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    trained: int = 0
    trained_tokens: int = 0
    loss: Tensor | float = 0.0  # of the optimizer step whose gradient is being summed
    stopped: bool = False  # whether the rest of the step's updates are left out

    def chunk(self, samples: Samples, row: dict[str, float]) -> None:
        """Note the metrics `row` of a chunk of samples that has arrived."""
        self.rows.append(row)
        if samples.lengths is not None:
            self.lengths.append(samples.lengths)

    def begin_update(self) -> list[dict[str, Any]]:
        """The scalars of the optimizer step whose gradient is being summed, a new one where the last was taken."""
        if len(self.scalars) == len(self.updates):
            self.scalars.append([])
        return self.scalars[-1]

    def micro_batch(self, samples: Samples, rows: Tensor, loss: Tensor) -> None:
        """The samples in `rows` [b] of this rank went through forward and backward pass, with this `loss`."""
        self.loss += loss
        self.trained += len(rows)
        if samples.tokens is not None:
            self.trained_tokens += int(samples.tokens[rows].sum())

    def take_loss(self) -> Tensor:
        """This rank's loss since the last optimizer step."""
        loss, self.loss = self.loss, 0.0
        assert isinstance(loss, Tensor), "an optimizer step has a micro-batch"
        return loss

    def metrics(self, planned: int) -> dict[str, float]:
        """All of them, on all ranks; `planned` optimizer steps there would be."""
        return merged_rows(self.rows) | update_metrics("actor", self.scalars, self.updates, planned)


class Updater:
    """The learning rule with what it is computed from, around the loop of forward and backward passes.

    `plan` is the arithmetic of a whole training step, `chunk_plan` that of each of its `chunks`. `teachers` are the
    algorithm's, loaded, and `critic` is the one that it wants. `costs` are those of training each of this rank's
    samples, where ranks exchange samples so that these are even; None: each rank trains those that it has.
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
        """`group`: see phalanx.training.collect.Collector. `score`: RewardSet.with_gradient, where the algorithm
        differentiates the reward.
        """
        self.cfg, self.plan, self.algorithm, self.policy, self.world = cfg, plan, algorithm, policy, world
        self.state, self.rescorer, self.timers, self.noun = state, rescorer, timers, noun
        self.teachers, self.critic, self.chunks, self.costs = dict(teachers or {}), critic, chunks, costs
        self.score, self.chunk_plan = score, plan
        self.routed = [teacher.name for teacher in algorithm.teachers if teacher.rows is not None]
        if chunks > 1:
            samples, per_rank = plan.samples // chunks, plan.per_rank // chunks
            self.chunk_plan = replace(plan, samples=samples, per_rank=per_rank, units=per_rank, updates=1)
        # sample i of all ranks is of prompt i // n
        self.group_id = torch.arange(self.chunk_plan.samples) // (group or cfg.rollout.n)  # [N]
        self.planned_updates = plan.updates * plan.epochs
        self._counts = torch.zeros(2, dtype=torch.int64)  # actions and samples of this rank since the last `apply`

    @property
    def expected_passes(self) -> int:
        """Forward and backward passes of a training step where all samples count; 0 where nobody knows."""
        if self.plan.budget is not None or self.chunks > 1:
            return 0
        epochs = self.plan.epochs + (0 if self.critic is None else self.critic.epochs)
        return epochs * self.plan.updates * self.plan.passes

    # -- shares of ranks ------------------------------------------------------------------------------------------

    def batches(self, samples: Samples, advantage: Tensor, counted: Tensor, units: Tensor, log: StepLog) -> Minibatches:
        """The batches of the samples that this rank trains, see Minibatches.of; with `costs` after an exchange."""
        ranks, updates, size = None, self.chunk_plan.updates, self.world.data_size
        if self.costs is not None and size > 1 and counted[units].any():
            drawn = Units.of(units, counted, samples.index, self.world)
            assert samples.tokens is not None, "samples that differ in cost have tokens"
            local = torch.stack([torch.tensor(self.costs(samples), dtype=torch.float64), samples.tokens.double()], 1)
            costs, tokens = all_gather(local)[units].sum(1).T  # [U] each, of all ranks
            trained = torch.zeros(size, dtype=torch.float64).index_add(0, drawn.ranks, tokens * drawn.counted)
            log.rows[-1]["perf/token_imbalance_drawn"] = float(trained.max() / trained.mean().clamp(min=1))
            # who trains what follows from the costs of all samples, which all ranks know
            ranks = drawn.balanced(costs, updates, size)
            if not ranks.equal(drawn.ranks):
                of_samples = torch.full((len(counted),), -1)
                of_samples[units] = ranks[:, None].expand(units.shape)
                samples = exchanged(samples, of_samples, self.world)
        return Minibatches.of(
            samples, advantage, counted, units, self.world, corrects=self.algorithm.corrects, ranks=ranks
        )

    # -- optimizer steps ------------------------------------------------------------------------------------------

    def optimizer_steps(self, batch: Minibatches, log: StepLog, step: int, chunk: int) -> Iterator[list[Pass]]:
        """The passes of each optimizer step on the samples of a chunk, epoch by epoch; with `levels`, the samples are
        corrupted anew in each epoch.

        All ranks make equally many passes; optimizer steps with nothing to learn are left out.
        """
        for epoch in range(self._epochs(step) if batch.learns else 0):
            if self.algorithm.levels is not None:
                # forward process: x_t = (1 - t) x_0 + t noise, with noise and t [B, W] of this epoch
                seeds = self._corruption_seeds(batch.samples, step, epoch)
                batch.corrupted = self.algorithm.corrupt(self.policy, batch.samples, seeds)
                if self.score is not None:
                    batch.score = partial(self.score, step=step)
                batch.reference_outputs = self.reference_outputs(batch)
            steps = self._steps(batch, log, chunk)
            # log pi_old by the very passes that follow, where their shapes depend on the samples in them
            if epoch == 0 and self.rescorer.in_training and not batch.samples.on_policy:
                batch.samples = self.rescorer.in_passes(batch.samples, [rows for passes in steps for rows, _ in passes])
            yield from steps

    def _steps(self, batch: Minibatches, log: StepLog, chunk: int) -> list[list[Pass]]:
        """The passes of the optimizer steps of an epoch, or a chunk's part of one."""
        actor, apart = self.cfg.actor, self.chunks > 1
        if apart:
            self._counts += batch.counts
        # the last chunk of an optimizer step has a pass in any case: gradients are reduced in the last one
        pending = apart and self.ends_update(chunk) and len(log.scalars) > len(log.updates)
        return optimizer_steps(
            batch.mask,
            batch.units,
            self.chunk_plan,
            self.world,
            mode=actor.loss_agg_mode,
            constant=actor.loss_scale_factor,
            tokens=batch.samples.tokens,
            summed=apart,
            at_least_one=pending,
        )

    def _epochs(self, step: int) -> int:
        """Passes over the samples of training step `step`; 0 while only the critic is trained."""
        warming_up = self.critic is not None and step < self.critic.warmup
        return 0 if warming_up else self.plan.epochs

    def _corruption_seeds(self, samples: Samples, step: int, epoch: int) -> list[int]:
        """A seed for each sample of this rank, a function of (trainer.seed, step, sample, epoch)."""
        return [fold_in(self.cfg.trainer.seed, step, int(i), "forward", epoch) for i in samples.index]

    def ends_update(self, chunk: int) -> bool:
        """Whether the passes of a chunk are the last ones of an optimizer step."""
        return (chunk + 1) % max(self.chunks // self.plan.updates, 1) == 0

    def apply(self, loss: Tensor) -> dict[str, float | Tensor]:
        """The optimizer step on the gradients that the backward passes left; `loss` is this rank's sum of them."""
        if self.chunks > 1:
            # The gradient of sum(l) was accumulated over chunks; T and S of all of them are known only now, so
            # that dividing here makes it that of the mean.
            actions, samples = reduce_sum(self._counts).tolist()
            self._counts.zero_()
            denominator = max(actions if self.cfg.actor.loss_agg_mode == "token-mean" else samples, 1)
            self.state.optimizer.scale_gradients(1 / denominator)
            loss = loss / denominator
        return self.state.step(loss)

    def too_far(self, scalars: Sequence[dict[str, Any]]) -> bool:
        """Whether the mean ratio of an update on all ranks is above the algorithm's `max_ratio`."""
        limit = self.algorithm.max_ratio
        if limit is None or "ratio_mean" not in scalars[0]:
            return False
        # mean of rho over micro-batches and ranks; all ranks must stop at the same update
        total = sum(float(row["ratio_mean"]) for row in scalars)
        return reduce_float(total, "sum") > limit * len(scalars) * self.world.data_size

    # -- other weights --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reference_outputs(self, batch: Minibatches) -> dict[str, Tensor]:
        """The outputs of other weights that the algorithm wants, about the samples of this rank's units: [B, ...] by
        name, with the samples in their places.
        """
        outputs: dict[str, Tensor] = {}
        passes, tokens = self.plan.passes_of(self.plan.together), batch.samples.tokens
        for name in self.algorithm.references:
            units, asked = self._asked(name, batch, passes.micro)
            if not len(units):  # on no rank
                continue
            policy, theirs, weights = self.reference(name, batch)
            results = []
            cut = passes.parts(len(units), None if tokens is None else tokens[units])
            with weights, policy.unsharded():
                for part in cut:
                    rows = units[part].flatten()
                    of_pass = theirs.select(rows, torch.ones(len(part), batch.mask.shape[1]))
                    results.append(self.algorithm.reference_output(policy, of_pass))
            joined, order = torch.cat(results), torch.cat(cut)
            places = units[order].flatten()
            if asked < len(units):  # without what fills up the passes
                real = (order < asked).repeat_interleave(units.shape[1]).nonzero().flatten()
                joined, places = joined[real.to(joined.device)], places[real]
            # back from the order of passes to the samples' own places [B, A, ...]
            key = TEACHER if name in self.routed else name
            if key not in outputs:
                outputs[key] = joined.new_zeros(len(batch.advantage), *joined.shape[1:])
            outputs[key][places.to(joined.device)] = joined
            if name in self.routed:
                asked_of = outputs.setdefault(ASKED, torch.full((len(batch.advantage),), -1, device=joined.device))
                asked_of[places.to(joined.device)] = self.routed.index(name)
        return outputs

    def asks(self, name: str, prompt: Prompt) -> bool:
        """Whether the weights of that name are asked about the samples of a prompt."""
        return name not in self.routed or prompt.teacher == name

    def _asked(self, name: str, batch: Minibatches, micro: int) -> tuple[Tensor, int]:
        """The units [u, s] of this rank that the passes with other weights see, and the number of those that these are
        asked about, which come first: with sharded weights all ranks make equally many passes.
        """
        local = batch.units.local
        if name not in self.routed:
            return local, len(local)
        # the samples of a unit are of one prompt
        prompts = batch.samples.prompts
        chosen = local[torch.tensor([self.asks(name, prompts[place]) for place in local[:, 0].tolist()])]
        most = reduce_int(len(chosen), "max")
        # whole passes, so that the shape of a pass does not depend on the rows of a step
        wanted = min(math.ceil(most / micro) * micro, len(local))
        filled = local[:1].expand(wanted - len(chosen), -1)
        return torch.cat([chosen, filled]), len(chosen)

    def reference(self, name: str, batch: Minibatches) -> tuple[Policy, Minibatches, AbstractContextManager[Any]]:
        """The policy that gives the outputs of that name, the samples that it sees, and a context with its weights."""
        if name in self.teachers:
            teacher = self.teachers[name]
            return teacher.policy, replace(batch, samples=teacher.samples(batch.samples)), nullcontext()
        return self.policy, batch, nullcontext() if name == "policy" else self.policy.using(name)

    def follow(self, step: int) -> None:
        """After training step number `step` (from 1): the algorithm's own weights follow the policy's."""
        averages = self.state.averages
        # theta_old <- d theta_old + (1 - d) theta
        for name in self.algorithm.averages:
            averages[name].update(self.algorithm.decay(name, step))
        sync = self.cfg.actor.ref_model_sync_steps
        if sync is not None and step % sync == 0 and "reference" in averages:
            averages["reference"].update(0.0)  # becomes a copy of the policy

    # -- performance ----------------------------------------------------------------------------------------------

    def performance(self, samples: Samples, log: StepLog, seconds: float) -> dict[str, float]:
        """Throughput, utilisation and memory of a training step that took `seconds`; samples are those of a chunk."""
        link = self.world.link
        ranks = self.world.size if link is None else link.roles.world_size
        row = {
            "perf/step_s": seconds,
            f"perf/{self.noun}_per_gpu_per_s": self.plan.samples / ranks / seconds,
            "perf/peak_memory_gb": reduce_float(peak_memory_gb(self.world.device), "max"),
        }
        if link is not None:
            row["idle/actor"] = self.timers.seconds("wait") / seconds
        peak = peak_flops(self.world.device, self.policy.trained.dtype)
        if peak is not None:
            # each rank goes by its own samples
            local = [float(self.step_flops(samples, log.trained, recomputed=again)) for again in (False, True)]
            flops = reduce_sum(torch.tensor(local, dtype=torch.float64)) / self.world.data_size
            used = flops / (seconds * ranks * peak)
            # no datasheet has a CPU's peak: `peak_flops` measures a rate, and these are shares of that one
            measured = "cpu_" if self.world.device.type == "cpu" else ""
            row[f"perf/{measured}mfu"], row[f"perf/{measured}hfu"] = used.tolist()
        self.timers.note_rate(self.plan.per_rank / seconds, self.noun)
        if log.lengths:
            lengths = torch.cat(log.lengths)
            self.timers.note_rate(int(lengths[:, :2].sum()) / seconds, "tokens")
            row |= token_metrics(lengths, log.trained_tokens, seconds, self.timers, ranks)
        return row

    def step_flops(self, samples: Samples, trained: int, *, recomputed: bool) -> int:
        """Floating-point operations of a training step on all ranks, in which `trained` samples of this rank were
        trained; `recomputed`: with what checkpointing repeats.
        """
        plan = self.plan
        cost = 0.0  # per sample, in forward passes of the policy
        for name in self.algorithm.references:
            share = sum(self.asks(name, prompt) for prompt in samples.prompts) / len(samples.prompts)
            cost += share * (self.teachers[name].relative_cost(samples) if name in self.teachers else 1.0)
        if self.critic is not None:
            cost += self.critic.relative_cost(self.policy.trained)
        references = cost * plan.reference_samples / plan.per_rank if trained > 0 else 0.0
        # sampling, references, and 3 times the forward pass (4 with recomputation) for each trained sample
        return self.policy.step_flops(
            samples,
            actions=self.algorithm.levels or samples.mask.shape[1],
            count=plan.samples,
            updates=trained / plan.per_rank,
            references=references,
            recomputed=recomputed,
        )
