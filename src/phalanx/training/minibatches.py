"""The samples of one rank, cut into optimizer steps, and these into the batches of its forward and backward passes."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.distributed.mesh import World
from phalanx.functional.aggregation import action_weights, count_actions
from phalanx.training.batches import BatchPlan
from phalanx.types import Batch, Samples


@dataclass
class MicroBatches:
    """This rank's B samples with all that a Batch has of them.

    advantage [B]; `reference_outputs` [B, ...] by names of weights; `corrupted` where a forward-process algorithm
    trains.
    """

    samples: Samples
    advantage: Tensor
    device: torch.device
    reference_outputs: dict[str, Tensor] = field(default_factory=dict)
    corrupted: Any = None

    @property
    def mask(self) -> Tensor:
        """[B, A] bool: the actions that are trained."""
        return self.samples.mask if self.corrupted is None else self.corrupted.mask

    def select(self, rows: Tensor, weight: Tensor) -> Batch:
        """The batch of the samples in `rows` [b]; weight [u, A] is that of each action of its units."""
        samples = self.samples
        assert samples.weight is None or len(weight) == len(rows), "corrections are of single samples"
        at = rows.to(self.device)
        weights = weight.to(self.device)
        return Batch(
            trace=samples.trace.select(at),
            log_prob=samples.log_prob[at],
            mask=self.mask[at],
            advantage=self.advantage.to(self.device)[at],
            weight=weights if samples.weight is None else weights * samples.weight[at],
            reference_outputs={name: values[at] for name, values in self.reference_outputs.items()},
            corrupted=None if self.corrupted is None else self.corrupted.select(at),
        )


@dataclass(frozen=True)
class Units:
    """What a step trains on: units of samples, in the order of their numbers, and which of them count.

    `counted` [U] bool, of all ranks' units. `mine` [u, s] are this rank's units, by the places of their samples on this
    rank, and `kept` [u] bool those of them that count.
    """

    counted: Tensor
    mine: Tensor
    kept: Tensor

    @classmethod
    def of(cls, numbers: Tensor, sample_mask: Tensor, plan: BatchPlan, world: World) -> "Units":
        """Units [U, s] of the samples of all ranks, where sample_mask [N] says which samples are trained on."""
        counted = sample_mask[numbers].all(1)
        share = len(numbers) // world.size
        own = slice(world.rank * share, (world.rank + 1) * share)
        return cls(counted, numbers[own] - world.rank * plan.per_rank, counted[own])


def optimizer_steps(
    mask: Tensor, units: Units, plan: BatchPlan, world: World, *, mode: str, constant: float | None
) -> list[list[tuple[Tensor, Tensor]]]:
    """The micro-batches of each optimizer step of a pass over the samples, each as the places of its samples on this
    rank [b] and the weights of its units' actions [u, A]; a step with nothing to learn is left out.

    Optimizer step k trains on the units whose number is k modulo the number of updates, so that each holds a share of
    every prompt, and the same whatever the number of ranks. All ranks make equally many micro-batches: as many as the
    one with most units that count, since the collectives of a backward pass want every rank. mask [B, A]: the actions
    of this rank's samples; see phalanx.functional.aggregation for `mode` and `constant`.
    """
    mask = mask.cpu()[units.mine[:, 0]]  # samples that are trained as one have their actions in common
    totals = torch.zeros(plan.updates, 2, dtype=torch.int64)
    for k in range(plan.updates):
        totals[k] = count_actions(mask[k :: plan.updates], units.kept[k :: plan.updates])
    if world.size > 1:
        dist.all_reduce(totals)
    steps = []
    for k, (actions, samples) in enumerate(totals.tolist()):
        busiest = int(units.counted[k :: plan.updates].view(world.size, -1).sum(1).max())
        if busiest == 0 or actions == 0:  # nothing to learn from, on any rank
            continue
        weight = action_weights(mask, units.kept, actions, samples, mode=mode, constant=constant)
        mine = torch.arange(k, len(units.mine), plan.updates)
        # those that count come first: the rest may be left out
        order = mine[torch.sort(~units.kept[mine], stable=True).indices]
        parts = order.split(plan.micro_units)[: math.ceil(busiest / plan.micro_units)]
        steps.append([(units.mine[part].flatten(), weight[part]) for part in parts])
    return steps
