"""The samples of one rank, cut into optimizer steps, and these into the batches of its forward and backward passes."""

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
    """Numbers of one training step.

    samples of all ranks; per_rank; updates: optimizer steps per pass over them; micro: samples of a forward and
    backward pass; actions: rows of each sample in it; rollout_micro: samples of a rollout micro-batch; exact: rollout
    and replay run at equal shapes, so that their log-probs agree bit by bit. epochs: passes over the samples;
    forward: each of them trains on samples that are corrupted anew.

    A rank trains `units` in a pass: samples, or `together` of the samples of each prompt as one. `budget`: in place of
    `micro`, the most tokens of a forward and backward pass. `packed`: its samples stand in one row, without padding,
    and `adjacent`: those that follow one another, of a prompt, stay together.
    `parts`: of a step, of which this is one, where samples are trained while further ones are drawn.
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
        """Whether the shape of a pass depends on which samples it has."""
        return self.budget is not None or self.packed

    def passes_of(self, together: int) -> Passes:
        """How units of `together` samples are cut into passes."""
        return Passes(max(self.micro // together, 1), self.budget, self.packed, self.adjacent)

    @property
    def micro_units(self) -> int:
        """Units of a forward and backward pass: whole ones, and at least one."""
        return max(self.micro // self.together, 1)

    @property
    def passes(self) -> int:
        """Micro-batches of an optimizer step on a rank, where all samples count."""
        return math.ceil(self.units // self.updates / self.micro_units)

    @property
    def reference_samples(self) -> int:
        """Samples of a rank that each of the references sees per step, counted each time."""
        # once, as for them nothing changes between two passes; but noise is fresh in each pass
        return (self.epochs if self.forward else 1) * self.units * self.together

    @property
    def trained(self) -> int:
        """Samples of a rank that are trained per step, counted each time, if all of them count."""
        return self.epochs * self.updates * self.first(self.passes)

    def first(self, passes: int) -> int:
        """Samples of the first `passes` micro-batches of an optimizer step on a rank."""
        return min(passes * self.micro_units, self.units // self.updates) * self.together


@dataclass
class Minibatches:
    """This rank's B samples with all that a Batch has of them, and the `units` that are trained.

    advantage [B], or [B, A] of each action; `reference_outputs` [B, ...] by names of weights; `corrupted` where a
    forward-process algorithm trains. `corrects`: see phalanx.types.Algorithm. `score(images, prompts=...)`: the reward
    with a gradient, where the algorithm differentiates it.
    """

    samples: Samples
    advantage: Tensor
    units: "Units"
    device: torch.device
    reference_outputs: dict[str, Tensor] = field(default_factory=dict)
    corrupted: Any = None
    corrects: bool = True
    score: Callable[..., Tensor] | None = None

    @classmethod
    def of(
        cls,
        samples: Samples,
        advantage: Tensor,
        sample_mask: Tensor,
        numbers: Tensor,
        world: World,
        *,
        corrects: bool,
        ranks: Tensor | None = None,
    ) -> "Minibatches":
        """The batches of this rank's samples, given advantage [N] and sample_mask [N] bool of those of all ranks, and
        the numbers [U, s] of the samples that are trained as one. `ranks`: see Units.of.
        """
        units = Units.of(numbers, sample_mask, samples.index, world, ranks)
        # advantages are of all ranks' samples [N], as groups span ranks
        return cls(samples, advantage[samples.index], units, world.device, corrects=corrects)

    @property
    def mask(self) -> Tensor:
        """[B, A] bool: the actions that are trained."""
        return self.samples.mask if self.corrupted is None else self.corrupted.mask

    @property
    def learns(self) -> bool:
        """Whether any sample of any rank is trained."""
        return bool(self.units.counted.any())

    @property
    def counts(self) -> Tensor:
        """[2] int64: the actions and the samples of this rank that are trained."""
        return count_actions(self.mask.cpu()[self.units.local[:, 0]], self.units.kept)

    def scored(self, values: Tensor | None) -> Scored:
        """The argument of `Algorithm.credit`; values [B, A] are the critic's, None without one."""
        # from units [u] to samples [B]: a sample counts where its unit does
        kept = torch.zeros(len(self.samples.index), dtype=torch.bool)
        kept[self.units.local.flatten()] = self.units.kept.repeat_interleave(self.units.local.shape[1])
        mask = self.samples.mask & kept.to(self.device)[:, None]
        samples, advantage = self.samples, self.advantage.to(self.device)
        return Scored(advantage, samples.log_prob, mask, self.reference_outputs, values, samples.action_reward)

    def select(self, rows: Tensor, weight: Tensor) -> Batch:
        """The batch of the samples in `rows` [b]; weight [u, A] is that of each action of its units."""
        samples = self.samples
        assert samples.weight is None or len(weight) == len(rows), "corrections are of single samples"
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
            mask=self.mask[at],
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
    """The units of samples that a step trains on, in the order of their numbers, and which of them count.

    `counted` [U] bool, of all ranks' units, and `ranks` [U], which of the ranks with different samples trains each.
    `numbers` [u] are this rank's units, `local` [u, s] the places of their samples on this rank, and `kept` [u] bool
    those of them that count.
    """

    counted: Tensor
    ranks: Tensor
    numbers: Tensor
    local: Tensor
    kept: Tensor

    @classmethod
    def of(
        cls, numbers: Tensor, sample_mask: Tensor, index: Tensor, world: World, ranks: Tensor | None = None
    ) -> "Units":
        """Units [U, s] of the samples of all ranks, where sample_mask [N] says which samples are trained on. This rank
        has the samples `index` [B], in ascending order. `ranks` [U]: see Units; None: each has consecutive units.
        """
        counted = sample_mask[numbers].all(1)  # [U]: a pair counts where both of its samples do
        if ranks is None:  # as they were drawn
            ranks = torch.arange(len(numbers)) // (len(numbers) // world.data_size)
        local = (ranks == world.data_rank).nonzero().flatten()
        return cls(counted, ranks, local, torch.searchsorted(index, numbers[local]), counted[local])

    def dealt(self, updates: int) -> Tensor:
        """[U] the optimizer step that trains on each unit; -1 for those that do not count.

        They are dealt out in turn, after those that do not count are gone: so steps differ by one unit at most, each
        holds a share of every prompt, and the layout has no part in it.
        """
        turn = (self.counted.cumsum(0) - 1) % updates  # 0, 1, .., updates - 1, 0, .. over the units that count
        return torch.where(self.counted, turn, -1)

    def balanced(self, costs: Tensor, updates: int, size: int) -> Tensor:
        """[U] which of `size` ranks trains each unit, where units of these costs [U] are spread as evenly as can be,
        equally many to each rank; `ranks`, where that makes no optimizer step shorter.
        """
        dealt, ranks = self.dealt(updates), torch.empty_like(self.ranks)
        left = torch.full((size,), len(self.numbers))
        # each optimizer step for itself, as there all ranks wait for one another; those that do not count come last
        for k in (*range(updates), -1):
            rows = (dealt == k).nonzero().flatten()
            # equal numbers make equally many passes, and leave each rank the room that `places` needs
            room = left if k == -1 else torch.full((size,), math.ceil(len(rows) / size))
            ranks[rows] = torch.tensor(evenly_dealt(costs[rows].tolist(), room.tolist()), dtype=ranks.dtype)
            left -= ranks[rows].bincount(minlength=size)

        def longest(ranks: Tensor) -> Tensor:
            """The sum over the optimizer steps of the costs of the rank with most."""
            totals = torch.zeros(updates, size, dtype=costs.dtype)
            at = (dealt[self.counted], ranks[self.counted])
            return totals.index_put(at, costs[self.counted], accumulate=True).amax(1).sum()

        return ranks if longest(ranks) < longest(self.ranks) else self.ranks

    def places(self, dealt: Tensor, updates: int) -> list[Tensor]:
        """This rank's units of each optimizer step, as rows of `local`: equally many, those that count come first.

        What a step lacks is filled up with units that do not count, so that all ranks can make equally many
        micro-batches of one size.
        """
        local = dealt[self.numbers]
        # units that do not count, divided alternately as well; their weights are 0
        spare = (local == -1).nonzero().flatten()
        turn = torch.arange(len(spare)) % updates
        spare = spare[torch.sort(turn, stable=True).indices]
        share, places = len(self.local) // updates, []
        for k in range(updates):
            real = (local == k).nonzero().flatten()
            lacking = share - len(real)
            places.append(torch.cat([real, spare[:lacking]]))  # [share]
            spare = spare[lacking:]
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
    """The micro-batches of each optimizer step of a pass over the samples, each as the places of its samples on this
    rank [b] and the weights of its units' actions [u, A]; a step with nothing to learn is left out.

    With `summed` the weights lack the denominator over all ranks (1 / T or 1 / S), which the caller divides by. With
    `at_least_one` a step with nothing to learn has a micro-batch, whose weights are 0.

    All ranks make equally many micro-batches: as many as the one with most units that count, since the collectives of a
    backward pass want every rank. mask [B, A]: the actions of this rank's samples; see phalanx.functional.aggregation
    for `mode` and `constant`. tokens [B]: the samples' lengths, where plan.budget goes by them.
    """
    # [u, A]; weights are made on the CPU, where counts are looked at without waiting for the device
    mask = mask.cpu()[units.local[:, 0]]  # samples that are trained as one have their actions in common
    dealt = units.dealt(plan.updates)
    places = units.places(dealt, plan.updates)
    # T and S of each optimizer step over all ranks [updates, 2]: the denominators of loss_agg_mode
    totals = torch.stack([count_actions(mask[rows], units.kept[rows]) for rows in places])
    if world.size > 1:
        totals = reduce_sum(totals)
    steps = []
    for k, (actions, samples) in enumerate(totals.tolist()):
        # collectives of a backward pass want every rank: all make as many passes as the rank with most units
        busiest = int(units.ranks[dealt == k].bincount(minlength=1).max())
        if busiest == 0 or actions == 0:  # nothing to learn from, on any rank
            if not at_least_one:
                continue
            busiest = 1
        if summed:  # gradients of sums, which Updater.apply divides once the last chunk is there
            actions = samples = 1
        # w [u, A] of L = sum of w l(action): 1/T, 1/S, .. for what counts, else 0
        weight = action_weights(mask, units.kept, actions, samples, mode=mode, constant=constant)
        # those that do not count come last, and may be left out
        if plan.budget is None:
            parts = places[k].split(plan.micro_units)[: math.ceil(busiest / plan.micro_units)]
        else:
            assert tokens is not None, "a budget of tokens is of samples that have some"
            # passes of whole units with at most `budget` tokens each
            passes, real = plan.passes_of(plan.together), int(units.kept[places[k]].sum())
            cut = passes.within_budget(tokens[units.local[places[k]]], real)
            parts = tuple(places[k][rows] for rows in cut)
        steps.append([(units.local[part].flatten(), weight[part]) for part in parts])
    return steps
