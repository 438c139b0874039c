"""Rewards from their terms, and group-relative advantages of rewards (GRPO, arXiv 2402.03300; without std: Dr.GRPO,
arXiv 2503.20783; RLOO: 2402.14740).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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


def check_range(reward: Tensor) -> Tensor:
    """The rewards [N]. Raises JobError, on all ranks, if float32 cannot hold their std. NaN is ignored."""
    largest = reward.nan_to_num(0.0).abs().max().item() if len(reward) else 0.0
    if not largest <= LARGEST:
        raise JobError(
            f"reward: the weighted sum of the terms is {largest:g} for a sample; expected at most {LARGEST:g}: lower "
            "the weights of reward.functions"
        )
    return reward


def group_advantage(
    reward: Tensor, group_id: Tensor, *, global_std: bool = False, normalize: bool = True, eps: float = 1e-4
) -> Tensor:
    """(reward - mean of the group) / (std + eps), over the samples of all ranks.

    Args:
        reward: [N].
        group_id: [N] integers, any values.
        global_std: divide by the std of all rewards instead of the group's.
        normalize: whether to divide at all; False is Dr.GRPO.
        eps: added to the population std.

    Returns:
        [N] float32; exactly 0 if all rewards of a group are equal.
    """
    r = reward.double()
    centred, variance = _centre_rewards(r, group_id)
    if normalize:
        std = torch.sqrt(((r - r.mean()) ** 2).mean()) if global_std else torch.sqrt(variance)
        centred = centred / (std + eps)
    return torch.where(has_signal(reward, group_id), centred, 0.0).float()


def leave_one_out(reward: Tensor, group_id: Tensor) -> Tensor:
    """[N] float32: each reward minus the mean of the other rewards of its group (RLOO, arXiv 2402.14740, equation 8);
    exactly 0 if all rewards of a group are equal, also for a group of one sample.
    """
    centred, _ = _centre_rewards(reward.double(), group_id)
    _, inverse, counts = torch.unique(group_id, return_inverse=True, return_counts=True)
    count = counts[inverse].double()
    values = centred * count / (count - 1).clamp(min=1)
    return torch.where(has_signal(reward, group_id), values, 0.0).float()


def on_scored(function: Callable[[Tensor, Tensor], Tensor], reward: Tensor, group_id: Tensor, missing: float) -> Tensor:
    """[N] values of `function` over the samples that have a reward, `missing` for samples without one (NaN)."""
    scored = ~reward.isnan()
    if scored.all():
        return function(reward, group_id)
    values = function(reward[scored], group_id[scored])
    result = values.new_full(reward.shape, missing)
    result[scored] = values
    return result


def fill_missing(reward: Tensor, group_id: Tensor) -> Tensor:
    """[N] the rewards, with each missing one (NaN) replaced by the mean of its group's known rewards, or by 0.

    A sample without a reward is thus neither the best nor the worst of its group, unless all are equal.
    """
    scored = ~reward.isnan()
    if scored.all():
        return reward
    ids, inverse = torch.unique(group_id, return_inverse=True)
    zeros = torch.zeros(len(ids), dtype=torch.float64, device=reward.device)
    total = zeros.index_add(0, inverse, torch.where(scored, reward.double(), 0.0))
    mean = total / zeros.index_add(0, inverse, scored.double()).clamp(min=1)
    return torch.where(scored, reward, mean[inverse].to(reward.dtype))


def has_signal(reward: Tensor, group_id: Tensor) -> Tensor:
    """[N] bool: whether the rewards of a sample's group differ."""
    ids, inverse = torch.unique(group_id, return_inverse=True)
    r = reward.double()
    zeros = torch.zeros(len(ids), dtype=r.dtype, device=r.device)
    # compare the extremes, since rounding keeps the variance of equal rewards from being exactly 0
    low = zeros.scatter_reduce(0, inverse, r, "amin", include_self=False)
    high = zeros.scatter_reduce(0, inverse, r, "amax", include_self=False)
    return (high > low)[inverse]


def top_and_bottom(reward: Tensor, group_id: Tensor, k: int) -> Tensor:
    """[N] bool: True for the k best and the k worst of each group; among equal rewards, the first ones."""
    return (rank_in_group(-reward, group_id) < k) | (rank_in_group(reward, group_id) < k)


def best_of_group(reward: Tensor, group_id: Tensor, k: int) -> Tensor:
    """[N] bool: True for the k best of each group whose rewards differ; among equal rewards, the first ones."""
    return has_signal(reward, group_id) & (rank_in_group(-reward, group_id) < k)


def rank_in_group(value: Tensor, group_id: Tensor) -> Tensor:
    """[N] int64: a sample's rank in its group, 0 for the smallest value; equal values keep their order."""
    order, counts = sorted_in_groups(value, group_id)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - first
    return rank


def sorted_in_groups(value: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor]:
    """The samples [N] sorted by group id, then by ascending value; and the groups' sizes [G]."""
    # two stable sorts: by value, then by group
    order = torch.argsort(value.double(), stable=True)
    order = order[torch.argsort(group_id[order], stable=True)]
    _, counts = torch.unique(group_id, return_counts=True)
    return order, counts


def group_weights(value: Tensor, group_id: Tensor, keep: Tensor) -> Tensor:
    """[N] float32: exp(value), scaled to a mean of 1 over each group's samples in `keep` [N] bool; 0 for others."""
    ids, inverse = torch.unique(group_id, return_inverse=True)
    v = torch.where(keep, value.double(), -torch.inf)
    zeros = torch.zeros(len(ids), dtype=v.dtype, device=v.device)
    # subtract the group's largest value, so that no exponential overflows
    top = zeros.scatter_reduce(0, inverse, v, "amax", include_self=False)
    # exp(-inf - -inf) is NaN in groups of which no sample is kept
    exp = torch.where(keep, torch.exp(v - top[inverse]), 0.0)
    mean = zeros.index_add(0, inverse, exp) / zeros.index_add(0, inverse, keep.double())
    return torch.where(keep, exp / mean[inverse], 0.0).float()


def group_std(reward: Tensor, group_id: Tensor) -> Tensor:
    """[G] float32: the population std of each group's rewards, in the order of the groups' ids."""
    _, variance = _centre_rewards(reward.double(), group_id)
    ids, inverse = torch.unique(group_id, return_inverse=True)
    return variance.new_zeros(len(ids)).scatter(0, inverse, torch.sqrt(variance)).float()


def _centre_rewards(r: Tensor, group_id: Tensor) -> tuple[Tensor, Tensor]:
    """[N] rewards minus their group's mean, and [N] their group's variance."""
    _, inverse, counts = torch.unique(group_id, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(counts), dtype=r.dtype, device=r.device)
    mean = zeros.index_add(0, inverse, r) / counts
    centred = r - mean[inverse]
    variance = zeros.index_add(0, inverse, centred**2) / counts
    return centred, variance[inverse]
