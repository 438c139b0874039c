"""Policy losses per sample and trained step, from likelihood ratios rho of Gaussian transitions.

Sources: PPO's clipped surrogate as in equation (5) of Flow-GRPO (arXiv 2505.05470); GRPO-Guard (arXiv 2510.22319);
Flow-DPPO (arXiv 2606.11025); the step weights of TempFlow-GRPO (arXiv 2508.04324).
"""

import torch
from torch import Tensor

from phalanx.functional.aggregation import ratio_metrics
from phalanx.types import Metrics


def clipped_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, *, clip_ratio: float
) -> tuple[Tensor, Metrics]:
    """`clipped_ratio` with rho = exp(log_prob - old_log_prob), both [B, ...]; old_log_prob is detached."""
    return clipped_ratio(log_prob.float() - old_log_prob.detach().float(), advantage, clip_ratio=clip_ratio)


def clipped_ratio(log_ratio: Tensor, advantage: Tensor, *, clip_ratio: float) -> tuple[Tensor, Metrics]:
    """max(-A rho, -A clip(rho, 1 - clip_ratio, 1 + clip_ratio)), rho = exp(log_ratio).

    Args:
        log_ratio: [B, ...].
        advantage: [B] (for all steps of a sample) or [B, ...].

    Returns:
        The loss per element [B, ...], float32, and metrics: those of `ratio_metrics`, clipfrac (elements outside the
        range), and clipfrac_higher and clipfrac_lower, those above and below it.
    """
    log_ratio, a = log_ratio.float(), spread(advantage, log_ratio)
    ratio = torch.exp(log_ratio)
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_ratio, 1 + clip_ratio))
    higher, lower = ratio > 1 + clip_ratio, ratio < 1 - clip_ratio
    clipped = {"clipfrac": higher | lower, "clipfrac_higher": higher, "clipfrac_lower": lower}
    return loss, ratio_metrics(log_ratio) | clipped


def masked_ratio(
    log_ratio: Tensor, divergence: Tensor, advantage: Tensor, *, threshold: float
) -> tuple[Tensor, Metrics]:
    """-A rho, but 0 if the policy has diverged from the old one by `threshold` and the update would go further.

    The second case is divergence >= threshold, and rho > 1 with A > 0 or rho < 1 with A < 0 (Flow-DPPO).

    Args:
        log_ratio: [B, ...], ln rho.
        divergence: [B, ...], KL(pi_old, pi) of the same transitions; it is detached.
        advantage: [B] (for all steps of a sample) or [B, ...].

    Returns:
        The loss per element [B, ...], float32, and metrics: those of `ratio_metrics`, divergence, and maskfrac
        (elements that are dropped).
    """
    log_ratio, a = log_ratio.float(), spread(advantage, log_ratio)
    divergence = divergence.detach().float()
    away = a * log_ratio.detach() > 0
    dropped = away & (divergence >= threshold)
    loss = torch.where(dropped, 0.0, -a * torch.exp(log_ratio))
    return loss, ratio_metrics(log_ratio) | {"divergence": divergence, "maskfrac": dropped}


def guarded_log_ratio(log_ratio: Tensor, divergence: Tensor, std: Tensor) -> Tensor:
    """(ln rho + b) c, the logarithm of GRPO-Guard's ratio, whose mean is 0 under the old policy.

    With dmu = mu - mu_old and x' = mu_old + c eps, ln rho = mean(dmu eps) / c - b, so the result is mean(dmu eps).

    Args:
        log_ratio: [B, W], ln rho of Gaussian log-probabilities.
        divergence: [B, W], b = mean(dmu^2) / 2 c^2.
        std: [W], c of the transitions.
    """
    return (log_ratio.float() + divergence.float()) * std.float()


def noise_weight(std: Tensor, typical_std: float) -> Tensor:
    """[W] weights of the trained steps, proportional to the std [W] of their transitions.

    `typical_std` is the mean std over all steps of the schedule that can be trained, so that the mean weight over these
    is 1. Within a window the mean may differ: late steps have a small std, and thus weights below 1.
    """
    return std.float() / typical_std


def spread(advantage: Tensor, values: Tensor) -> Tensor:
    """Advantages [B] or [B, ...] in float32, detached and shaped to broadcast over values [B, ...]."""
    a = advantage.detach().float()
    return a.reshape(*a.shape, *[1] * (values.dim() - a.dim()))
