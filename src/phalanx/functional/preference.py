"""Preference losses on pairs of samples (Diffusion-DPO, arXiv 2311.12908, equation 14)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from phalanx.functional.advantage import sorted_in_groups


def dpo_loss(error: Tensor, reference_error: Tensor, *, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-log sigmoid(-beta / 2 [(e_w - e_w_ref) - (e_l - e_l_ref)]).

    Args:
        error: [U, 2, ...] the policy's regression errors e of (winner, loser), each a mean over a sample's dims.
        reference_error: [U, 2, ...] those of the reference; it carries no gradient.
        beta: how much a difference of errors counts.

    Returns:
        The loss [U, ...], float32, and detached scalars: dpo_loss, its mean, accuracy, the share of pairs whose winner
        has the larger implicit reward r = -beta / 2 (e - e_ref), and margin, the mean of r_w - r_l.
    """
    gain = -0.5 * beta * (error.float() - reference_error.detach().float())
    margin = gain[:, 0] - gain[:, 1]
    loss = -logsigmoid(margin)
    with torch.no_grad():
        stats = {"dpo_loss": loss.mean(), "accuracy": (margin > 0).float().mean(), "margin": margin.mean()}
    return loss, stats


def best_and_worst(reward: Tensor, group_id: Tensor) -> Tensor:
    """[G, 2] int64: the indices of the samples with the highest and with the lowest reward of each group, groups in
    ascending order of their ids. Among equal rewards the last is the best and the first the worst, so that they differ.
    """
    order, counts = sorted_in_groups(reward, group_id)
    ends = counts.cumsum(0)
    return torch.stack([order[ends - 1], order[ends - counts]], 1)
