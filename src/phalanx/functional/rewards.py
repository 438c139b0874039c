"""From a reward's terms to one number per sample: clipped, normalised, weighted and summed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.functional.advantage import group_advantage

# far below any spread of scores: terms that cancel leave nothing that would be normalised again
_EPS = 1e-6

LARGEST = 1e18  # of a score or a reward: float32 holds no squares of larger ones, and their std would be infinite


@dataclass(frozen=True)
class Share:
    """One term's part in the sum: its `weight`, and the range `clip` (low, high) of its scores.

    With `initial_weight`, the weight changes linearly from it to `weight` in the first `weight_steps` training steps.
    """

    weight: float = 1.0
    clip: tuple[float, float] | None = None
    initial_weight: float | None = None
    weight_steps: int = 0

    @property
    def counts(self) -> bool:
        """Whether the weight is another than 0 in any step."""
        return self.weight != 0 or bool(self.initial_weight)

    def at(self, step: int | None) -> float:
        """The weight in training step `step`, counted from 0; None: the last one."""
        if step is None or self.initial_weight is None or step >= self.weight_steps:
            return self.weight
        return self.initial_weight + (self.weight - self.initial_weight) * step / self.weight_steps


def combine(
    terms: list[Tensor], shares: list[Share], *, step: int | None = None, group_id: Tensor | None = None
) -> Tensor:
    """The reward [N] of N samples: the sum of their terms, each clipped, then times its weight.

    With `group_id` [N], each clipped term is first centred and divided by its std within every group, so that no term
    outweighs another by its scale; a term that is equal for a whole group adds 0. That is the first half of GDPO (arXiv
    2601.05242); the second divides the sum by its std over the batch.
    """
    total = torch.zeros_like(terms[0])
    for values, share in zip(terms, shares, strict=True):
        part = values if share.clip is None else values.clamp(*share.clip)
        part = part if group_id is None else group_advantage(part, group_id, eps=_EPS)
        total = total + share.at(step) * part
    return total
