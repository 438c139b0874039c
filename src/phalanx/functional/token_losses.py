"""Policy losses per token, from likelihood ratios rho.

Sources: PPO's clipped surrogate (arXiv 1707.06347, equation 7), with DAPO's two clip ranges (arXiv 2503.14476, equation
10) and the dual clip for negative advantages (arXiv 1912.09729, equation 5); CISPO's clipped weight (arXiv 2506.13585,
equations 4 and 5); SAPO's soft gate (arXiv 2511.20347, equations 5 and 6); the three estimates of a KL divergence of
J. Schulman (http://joschu.net/blog/kl-approx.html).
"""

import torch
from torch import Tensor

KL_TYPES = ("k1", "k2", "k3")
KL_LOSS_TYPES = (*KL_TYPES, "k1+", "k3+")  # verl's names of the straight-through variants
LARGEST = 20.0  # bound of |ln rho|, so that exp does not overflow


def clipped_tokens(
    log_ratio: Tensor, advantage: Tensor, mask: Tensor, *, low: float, high: float, dual: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)), for A < 0 at most -A dual.

    Args:
        log_ratio: [B, A], ln rho.
        advantage: [B] (for all tokens of a sample) or [B, A].
        mask: [B, A] bool, the real tokens, over which the scalars average.

    Returns:
        The loss per token [B, A] float32, and detached scalars: those of `token_stats`, clipfrac_higher and
        clipfrac_lower (the fractions above and below the range), and clipfrac (the fraction whose gradient is clipped).
    """
    a = spread(advantage, log_ratio)
    ratio = torch.exp(log_ratio.clamp(-LARGEST, LARGEST))
    plain, clipped = -a * ratio, -a * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    if dual is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual), loss)
    with torch.no_grad():
        stats = token_stats(log_ratio, mask) | {
            "clipfrac": masked_mean((clipped > plain).float(), mask),
            "clipfrac_higher": masked_mean((ratio > 1 + high).float(), mask),
            "clipfrac_lower": masked_mean((ratio < 1 - low).float(), mask),
        }
    return loss, stats


def weighted_tokens(
    log_prob: Tensor, log_ratio: Tensor, advantage: Tensor, mask: Tensor, *, low: float | None, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A w log p, with the detached weight w = clip(rho, 1 - low, 1 + high); low None: no lower bound.

    Shapes and results as in `clipped_tokens`; clipfrac is the fraction of tokens whose weight is clipped.
    """
    ratio = torch.exp(log_ratio.detach().clamp(-LARGEST, LARGEST))
    above, below = ratio > 1 + high, ratio < (0.0 if low is None else 1 - low)
    weight = ratio.clamp(None if low is None else 1 - low, 1 + high)
    stats = token_stats(log_ratio, mask) | {
        "clipfrac": masked_mean((above | below).float(), mask),
        "clipfrac_higher": masked_mean(above.float(), mask),
        "clipfrac_lower": masked_mean(below.float(), mask),
    }
    return -spread(advantage, log_ratio) * weight * log_prob, stats


def gated_tokens(
    log_ratio: Tensor, advantage: Tensor, mask: Tensor, *, tau_pos: float, tau_neg: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A f(rho) with f(rho) = 4 / tau sigmoid(tau (rho - 1)), whose slope at rho = 1 is 1; tau is tau_pos for A > 0,
    else tau_neg.

    Shapes and results as in `clipped_tokens`, except that `gate`, the mean slope of f, replaces the clip fractions.
    """
    a = spread(advantage, log_ratio)
    ratio = torch.exp(log_ratio.clamp(-LARGEST, LARGEST))
    tau = torch.where(a > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1))
    with torch.no_grad():
        stats = token_stats(log_ratio, mask) | {"gate": masked_mean(4 * gate * (1 - gate), mask)}
    return -a * 4 / tau * gate, stats


def kl_estimate(log_prob: Tensor, other: Tensor, kind: str) -> Tensor:
    """An estimate of KL(policy, other) at each token that the policy sampled, from both log-probabilities [B, A].

    With d = other - log_prob: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d. The values of k1 and k3 are unbiased, but
    only k2 has the expected gradient of the KL: that of k1 is 0, and that of k3 is the forward KL's. k1+ and k3+
    therefore have the value of k1 and k3 with the gradient of k2.

    Raises:
        ValueError: for another kind.
    """
    if kind in ("k1+", "k3+"):
        slope = kl_estimate(log_prob, other, "k2")
        return kl_estimate(log_prob, other, kind[:2]).detach() + (slope - slope.detach())
    d = (other - log_prob).clamp(-LARGEST, LARGEST)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d**2 / 2
    if kind == "k3":
        return torch.expm1(d) - d
    raise ValueError(f"kl_estimate: kind {kind!r} should be one of {', '.join(KL_LOSS_TYPES)}")


@torch.no_grad()
def token_stats(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Scalars of rho, from ln rho [B, A] over the tokens of a mask [B, A], see phalanx.functional.losses.ratio_stats;
    those of rho = 1 if the mask is empty.
    """
    log_ratio = log_ratio[mask] if mask.any() else log_ratio.new_zeros(1)
    ratio = torch.exp(log_ratio)
    return {
        "ratio_mean": ratio.mean(),
        "ratio_error": (ratio - 1).abs().max(),
        "approx_kl": (torch.expm1(log_ratio) - log_ratio).mean(),
    }


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of values [B, A] over the tokens of a mask [B, A]; 0 if the mask is empty."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def spread(advantage: Tensor, values: Tensor) -> Tensor:
    """Advantages [B] or [B, A] in float32, detached and shaped to broadcast over values [B, A]."""
    a = advantage.detach().float()
    return a if a.dim() == values.dim() else a[:, None]
