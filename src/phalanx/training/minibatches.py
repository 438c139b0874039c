"""Split the samples of one rank into optimizer steps, and each of these into forward and backward passes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.distributed.collectives import reduce_sum
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.functional.aggregation import action_weights, count_actions
from phalanx.functional.token_budget import evenly_dealt
from phalanx.types import Batch, Samples, Scored


@dataclass(frozen=True)
class BatchPlan:
    """Batch sizes of one training step.

    samples: of all ranks. per_rank: samples of each rank. updates: optimizer steps per epoch. micro: samples per
    forward and backward pass. actions: rows per sample in such a pass. rollout_micro: samples per rollout micro-batch.
    exact: rollout and replay run at equal shapes, so their log-probs are bit-identical. units: units of a rank, each of
    `together` samples of one prompt that are trained as one. epochs: epochs over the samples. forward: each epoch
    trains on freshly corrupted samples. budget: maximum tokens per forward and backward pass, instead of `micro`.
    packed: the samples of a pass form one row without padding. adjacent: consecutive samples of a prompt stay in one
    pass. parts: number of chunks of a training step if samples are trained while others are still being drawn.
    """

    samples: int
    per_rank: int
    updates: int
    micro: int
    actions: int
    rollout_micro: int
    exact: bool
    units: int
    together: int = 1
    epochs: int = 1
    forward: bool = False
    budget: int | None = None
    packed: bool = False
    adjacent: bool = False
    parts: int = 1

    @property
    def by_tokens(self) -> bool:
        """Whether the shape of a pass depends on the samples in it."""
        return self.budget is not None or self.packed

    def passes_of(self, together: int) -> Passes:
        """How to split units of `together` samples into passes."""
        return Passes(max(self.micro // together, 1), self.budget, self.packed, self.adjacent)

    @property
    def micro_units(self) -> int:
        """Whole units per forward and backward pass, at least one."""
        return max(self.micro // self.together, 1)

    @property
    def passes(self) -> int:
        """Micro-batches per optimizer step on a rank if all samples count."""
        return math.ceil(self.units // self.updates / self.micro_units)

    @property
    def reference_samples(self) -> int:
        """Samples of a rank per training step that pass through each reference, counted once per pass."""
        # one pass, since neither inputs nor weights change between epochs, unless each epoch draws fresh noise
        return (self.epochs if self.forward else 1) * self.units * self.together

    def first(self, passes: int) -> int:
        """Samples of the first `passes` micro-batches of an optimizer step on a rank."""
        return min(passes * self.micro_units, self.units // self.updates) * self.together


@dataclass
class Minibatches:
    """This rank's B samples with everything that a Batch needs, and the `units` to train.

    advantage: [B], or [B, A] with one per action. reference_outputs: name of the weights -> [B, ...]. corrupted: the
    corrupted samples, for forward-process algorithms. corrects: see phalanx.types.Algorithm. score(images,
    prompts=...): the reward with a gradient, if the algorithm differentiates it. pending: these are the last samples of
    an optimizer step to which earlier chunks have contributed. counted: [B] bool, the samples that count within units
    that are trained without the others; None: all.
    """

    samples: Samples
    advantage: Tensor
    units: "Units"
    device: torch.device
    reference_outputs: dict[str, Tensor] = field(default_factory=dict)
    corrupted: Any = None
    corrects: bool = True
    score: Callable[..., Tensor] | None = None
    pending: bool = False
    counted: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """[B, A] bool: the actions to train."""
        return self.samples.mask if self.corrupted is None else self.corrupted.mask

    @property
    def learns(self) -> bool:
        """Whether any rank has a sample to train, or an optimizer step waits for the last of its passes."""
        return self.pending or bool(self.units.counted.any())

    @property
    def counts(self) -> Tensor:
        """[2] int64: the numbers of actions and samples this rank trains."""
        return count_actions(self.mask.cpu()[self.units.local[:, 0]], self.units.kept)

    def scored(self, values: Tensor | None) -> Scored:
        """The argument of `Algorithm.credit`. values: [B, A] from the critic, None without one."""
        # from units [u] to samples [B]: a sample counts if its unit does
        kept = torch.zeros(len(self.samples.index), dtype=torch.bool)
        kept[self.units.local.flatten()] = self.units.kept.repeat_interleave(self.units.local.shape[1])
        mask = self.samples.mask & kept.to(self.device)[:, None]
        samples, advantage = self.samples, self.advantage.to(self.device)
        return Scored(advantage, samples.log_prob, mask, self.reference_outputs, values, samples.action_reward)

    def select(self, rows: Tensor, weight: Tensor) -> Batch:
        """The batch of the samples `rows` [b]; weight [u, A] has the weights of their units' actions."""
        samples = self.samples
        assert samples.weight is None or len(weight) == len(rows), "corrections need units of one sample"
        at = rows.to(self.device)  # [b]
        weights = weight.to(self.device)
        correction = None if samples.weight is None else samples.weight[at]
        if correction is not None and not self.corrects:
            weights, correction = weights * correction, None
        score = None
        if self.score is not None:
            score = partial(self.score, prompts=[samples.prompts[i] for i in rows.tolist()])
        return Batch(
            trace=samples.trace.select(at),
            log_prob=samples.log_prob[at],
            mask=self.mask[at] if self.counted is None else self.mask[at] & self.counted[rows].to(self.device)[:, None],
            advantage=self.advantage.to(self.device)[at],
            weight=weights,
            reference_outputs={name: values[at] for name, values in self.reference_outputs.items()},
            corrupted=None if self.corrupted is None else self.corrupted.select(at),
            on_policy=samples.on_policy,
            correction=correction,
            score=score,
        )


@dataclass(frozen=True)
class Units:
    """The U units of a training step in ascending order, and the u units of this rank, each of s samples.

    counted: [U] bool, the units that count. ranks: [U], the data-parallel rank that trains each unit. numbers: [u],
    this rank's units. local: [u, s], the rows of their samples on this rank. kept: [u] bool, this rank's units that
    count.
    """

    counted: Tensor
    ranks: Tensor
    numbers: Tensor
    local: Tensor
    kept: Tensor

    @classmethod
    def of(
        cls,
        numbers: Tensor,
        sample_mask: Tensor,
        index: Tensor,
        world: World,
        ranks: Tensor | None = None,
        *,
        partial: bool = False,
    ) -> "Units":
        """Build the units from the sample numbers [U, s] of each.

        sample_mask: [N] bool, the samples to train on. index: [B] ascending, the numbers of this rank's samples. ranks:
        [U], see Units; None: each rank trains the same number of consecutive units. partial: a unit counts if any of
        its samples does.
        """
        each = sample_mask[numbers]
        counted = each.any(1) if partial else each.all(1)  # [U]: a pair counts if both of its samples do
        if ranks is None:  # the ranks that sampled them
            ranks = torch.arange(len(numbers)) // (len(numbers) // world.data_size)
        local = (ranks == world.data_rank).nonzero().flatten()
        return cls(counted, ranks, local, torch.searchsorted(index, numbers[local]), counted[local])

    def dealt(self, updates: int) -> Tensor:
        """[U] the optimizer step that trains each unit; -1 for units that do not count.

        Only units that count are dealt out, one by one: steps differ by at most one unit, each has a share of every
        prompt, and the result does not depend on the number of ranks.
        """
        turn = (self.counted.cumsum(0) - 1) % updates  # 0, 1, .., updates - 1, 0, .. over the units that count
        return torch.where(self.counted, turn, -1)

    def balanced(self, costs: Tensor, updates: int, size: int) -> Tensor:
        """[U] which of `size` ranks trains each unit, so that the costs [U] are balanced and all ranks have the same
        number of units; the present `ranks` if balancing does not shorten the training.
        """
        dealt, ranks = self.dealt(updates), torch.empty_like(self.ranks)
        left = torch.full((size,), len(self.numbers))
        # balance each optimizer step separately, since all ranks wait there; last, the units that do not count (-1)
        for k in (*range(updates), -1):
            rows = (dealt == k).nonzero().flatten()
            # equal numbers of units need equally many passes, and leave each rank the room that `places` needs
            room = left if k == -1 else torch.full((size,), math.ceil(len(rows) / size))
            ranks[rows] = torch.tensor(evenly_dealt(costs[rows].tolist(), room.tolist()), dtype=ranks.dtype)
            left -= ranks[rows].bincount(minlength=size)

        def longest(ranks: Tensor) -> Tensor:
            """The highest cost of any rank, summed over the optimizer steps."""
            totals = torch.zeros(updates, size, dtype=costs.dtype)
            at = (dealt[self.counted], ranks[self.counted])
            return totals.index_put(at, costs[self.counted], accumulate=True).amax(1).sum()

        return ranks if longest(ranks) < longest(self.ranks) else self.ranks

    def places(self, dealt: Tensor, updates: int) -> list[Tensor]:
        """This rank's units of each optimizer step, as rows of `local`; the units that count come first.

        Units that do not count fill up the steps, so that all steps have the same number of units and all ranks can run
        equally many micro-batches of one size.
        """
        local = dealt[self.numbers]
        # the units that do not count are spread over the steps in the same alternating order; their weights are 0
        spare = (local == -1).nonzero().flatten()
        turn = torch.arange(len(spare)) % updates
        spare = spare[torch.sort(turn, stable=True).indices]
        share, places = len(self.local) // updates, []
        for k in range(updates):
            real = (local == k).nonzero().flatten()
            missing = share - len(real)
            places.append(torch.cat([real, spare[:missing]]))  # [share]
            spare = spare[missing:]
        return places


def optimizer_steps(
    mask: Tensor,
    units: Units,
    plan: BatchPlan,
    world: World,
    *,
    mode: str,
    constant: float | None,
    tokens: Tensor | None = None,
    summed: bool = False,
    at_least_one: bool = False,
) -> list[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each optimizer step of one epoch.

    All ranks run equally many micro-batches, as many as the rank with the most units that count, because the
    collectives of a backward pass involve all ranks. Steps without a unit that counts are left out.

    Args:
        mask: [B, A] bool, the actions of this rank's samples.
        mode, constant: see phalanx.functional.aggregation.
        tokens: [B], the samples' lengths; needed with plan.budget.
        summed: leave the denominator over all ranks (1 / T or 1 / S) out of the weights; the caller divides by it.
        at_least_one: a step without a unit that counts has one micro-batch with weights of 0.

    Returns:
        Per step and micro-batch, the rows [b] of its samples and the weights [u, A] of their units' actions.
    """
    # [u, A], on the CPU, where reading counts does not wait for the device
    mask = mask.cpu()[units.local[:, 0]]  # the samples of a unit share their actions
    dealt = units.dealt(plan.updates)
    places = units.places(dealt, plan.updates)
    # T and S of each optimizer step over all ranks [updates, 2]: the denominators of loss_agg_mode
    totals = torch.stack([count_actions(mask[rows], units.kept[rows]) for rows in places])
    if world.size > 1:
        totals = reduce_sum(totals)
    steps = []
    for k, (actions, samples) in enumerate(totals.tolist()):
        # units of the busiest rank: all ranks run as many passes as it needs
        busiest = int(units.ranks[dealt == k].bincount(minlength=1).max())
        if busiest == 0 or actions == 0:  # no rank has anything to train
            if not at_least_one:
                continue
            busiest = 1
        if summed:  # gradients of sums; Updater.apply divides them after the last chunk
            actions = samples = 1
        # w [u, A] of L = sum of w l(action): 1/T, 1/S, .. for actions that count, else 0
        weight = action_weights(mask, units.kept, actions, samples, mode=mode, constant=constant)
        # the units that do not count come last, so passes that would contain only these are left out
        if plan.budget is None:
            parts = places[k].split(plan.micro_units)[: math.ceil(busiest / plan.micro_units)]
        else:
            assert tokens is not None, "a token budget needs the samples' lengths"
            # passes of whole units with at most `budget` tokens each
            passes, real = plan.passes_of(plan.together), int(units.kept[places[k]].sum())
            cut = passes.within_budget(tokens[units.local[places[k]]], real)
            parts = tuple(places[k][rows] for rows in cut)
        steps.append([(units.local[part].flatten(), weight[part]) for part in parts])
    return steps
