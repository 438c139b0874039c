"""Combine a reward's terms into one number per sample: clip, normalise, weight and sum."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.functional.advantage import group_advantage
from phalanx.types import JobError

# far below the spread of any scores, but above rounding errors, which normalisation must not amplify
_EPS = 1e-6

LARGEST = 1e18  # bound of scores and rewards: squares of larger ones overflow float32, and their std would be infinite


@dataclass(frozen=True)
class Share:
    """How a term enters the sum: its `weight`, and the range `clip` (low, high) of its scores.

    With `initial_weight`, the weight changes linearly from this to `weight` during the first `weight_steps` steps.
    """

    weight: float = 1.0
    clip: tuple[float, float] | None = None
    initial_weight: float | None = None
    weight_steps: int = 0

    @property
    def counts(self) -> bool:
        """Whether the weight is nonzero in any step."""
        return self.weight != 0 or bool(self.initial_weight)

    def at(self, step: int | None) -> float:
        """The weight in training step `step`, counted from 0; None: the final weight."""
        if step is None or self.initial_weight is None or step >= self.weight_steps:
            return self.weight
        return self.initial_weight + (self.weight - self.initial_weight) * step / self.weight_steps


def combine(
    terms: list[Tensor], shares: list[Share], *, step: int | None = None, group_id: Tensor | None = None
) -> Tensor:
    """The reward [N] of N samples: the weighted sum of their clipped terms.

    With `group_id` [N], each clipped term is first centred and divided by its std within its group, so that the scale
    of a term does not matter; a term that is equal for a whole group adds 0. This is the first half of GDPO (arXiv
    2601.05242); the second half divides the sum by its std over the batch.
    """
    total = torch.zeros_like(terms[0])
    for values, share in zip(terms, shares, strict=True):
        part = values if share.clip is None else values.clamp(*share.clip)
        part = part if group_id is None else group_advantage(part, group_id, eps=_EPS)
        total = total + share.at(step) * part
    return total


def check_range(reward: Tensor) -> None:
    """Raise JobError, on all ranks, for rewards [N] too large for float32 to hold their std. NaN is ignored."""
    largest = reward.nan_to_num(0.0).abs().max().item() if len(reward) else 0.0
    if not largest <= LARGEST:
        raise JobError(
            f"reward: the weighted sum of the terms is {largest:g} for a sample; expected at most {LARGEST:g}: lower "
            "the weights of reward.functions"
        )
