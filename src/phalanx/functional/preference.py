"""Preference losses on pairs of samples (Diffusion-DPO, arXiv 2311.12908, equation 14) and on groups (DGPO, arXiv
2510.08425).
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from phalanx.functional.advantage import sorted_in_groups
from phalanx.types import Metrics


def dpo_loss(error: Tensor, reference_error: Tensor, *, beta: float) -> tuple[Tensor, Metrics]:
    """-log sigmoid(-beta / 2 [(e_w - e_w_ref) - (e_l - e_l_ref)]).

    Args:
        error: [U, 2, ...], the policy's regression errors e of (winner, loser), each a mean over a sample's dims.
        reference_error: [U, 2, ...], those of the reference; it is detached.
        beta: weight of a difference of errors.

    Returns:
        The loss [U, ...], float32, and metrics: dpo_loss (the same), accuracy (pairs whose winner has the larger
        implicit reward r = -beta / 2 (e - e_ref)), and margin (r_w - r_l).
    """
    return pair_loss(-0.5 * (error.float() - reference_error.detach().float()), beta=beta)


def pair_loss(gain: Tensor, *, beta: float, kind: str = "sigmoid") -> tuple[Tensor, Metrics]:
    """-log sigmoid(beta [g_w - g_l]) (DPO, arXiv 2305.18290, equation 7); for the kind `ipo`, (g_w - g_l - 1 / (2
    beta))^2 (arXiv 2310.12036, equation 17).

    Args:
        gain: [U, 2, ...], the log-ratios g of (winner, loser) to a reference.
        beta: weight of a difference of gains.

    Returns:
        The loss [U, ...] and metrics: dpo_loss (the same), accuracy (pairs whose winner has the larger implicit reward
        beta g), and margin (beta [g_w - g_l]).
    """
    margin = beta * (gain[:, 0] - gain[:, 1])
    loss = -logsigmoid(margin) if kind == "sigmoid" else (margin / beta - 1 / (2 * beta)) ** 2
    return loss, {"dpo_loss": loss, "accuracy": margin > 0, "margin": margin}


def group_preference(
    error: Tensor, reference_error: Tensor, advantage: Tensor, *, beta: float, known: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """-1 / beta log sigmoid(-beta mean over the group of A (e - e_ref)).

    Samples with A > 0 are preferred to those with A < 0, each weighted by |A|. Partition functions cancel if the
    advantages of a group sum to 0.

    Args:
        error: [U, n, ...], the policy's regression errors e of a group of n samples, each a mean over a sample's dims.
        reference_error: [U, n, ...], those of the reference; it is detached.
        advantage: [U, n].
        beta: the larger, the sooner correctly ranked groups lose their gradient.
        known: [U, n] bool, the samples that are part of the group; None: all.

    Returns:
        The loss [U, ...], float32, and metrics: dgpo_loss (the same), accuracy (groups whose preferred samples have the
        larger implicit reward), and margin (-beta mean A (e - e_ref)).
    """
    a = advantage.float().view(*advantage.shape, *[1] * (error.dim() - 2))
    products = a * (error.float() - reference_error.detach().float())
    margin = -beta * (products.mean(1) if known is None else mean_of_known(products, known))
    loss = -logsigmoid(margin) / beta
    return loss, {"dgpo_loss": loss, "accuracy": margin > 0, "margin": margin}


def mean_of_known(values: Tensor, known: Tensor) -> Tensor:
    """[U, n, ...], [U, n] bool -> [U, ...]: the mean over the samples of each group that are known."""
    at = known.view(*known.shape, *[1] * (values.dim() - 2))
    return torch.where(at, values, 0).sum(1) / at.sum(1).clamp(min=1)


def best_and_worst(reward: Tensor, group_id: Tensor) -> Tensor:
    """[G, 2] int64: the indices of the samples with the highest and the lowest reward of each group, in the order of
    group ids. Among equal rewards, the last sample is the best and the first the worst, so that the two differ.
    """
    order, counts = sorted_in_groups(reward, group_id)
    ends = counts.cumsum(0)
    return torch.stack([order[ends - 1], order[ends - counts]], 1)
