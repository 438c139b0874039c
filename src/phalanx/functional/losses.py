"""Policy losses, per sample and trained step. Equation (5) of Flow-GRPO (arXiv 2505.05470): PPO's clipped surrogate."""

import torch
from torch import Tensor


def clipped_surrogate(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, *, clip_ratio: float, adv_clip_max: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A rho, -A clip(rho, 1 - clip_ratio, 1 + clip_ratio)), rho = exp(log_prob - old_log_prob).

    Args:
        log_prob, old_log_prob: [B, ...]; only log_prob carries a gradient.
        advantage: [B] (for all steps of a sample) or [B, ...]; clamped to +-adv_clip_max.

    Returns:
        The loss per element [B, ...], float32, and detached scalars: ratio_mean, ratio_std, ratio_error (the largest
        |rho - 1|), approx_kl (rho - 1 - ln rho, Schulman's k3), clipfrac, and clipfrac_higher and clipfrac_lower, the
        shares above and below the range.
    """
    new, old = log_prob.float(), old_log_prob.detach().float()
    a = advantage.detach().float().clamp(-adv_clip_max, adv_clip_max)
    a = a.reshape(*a.shape, *[1] * (new.dim() - a.dim()))
    log_ratio = new - old
    ratio = torch.exp(log_ratio)
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - clip_ratio, 1 + clip_ratio))
    with torch.no_grad():
        higher, lower = (ratio > 1 + clip_ratio).float().mean(), (ratio < 1 - clip_ratio).float().mean()
        stats = {
            "ratio_mean": ratio.mean(),
            "ratio_std": ratio.std(correction=0),
            "ratio_error": (ratio - 1).abs().max(),
            "approx_kl": (torch.expm1(log_ratio) - log_ratio).mean(),  # rho - 1 would drown it: ratios are near 1
            "clipfrac": higher + lower,
            "clipfrac_higher": higher,
            "clipfrac_lower": lower,
        }
    return loss, stats
