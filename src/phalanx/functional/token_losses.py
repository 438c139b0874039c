"""Policy losses per token, from likelihood ratios rho.

Sources: PPO's clipped surrogate (arXiv 1707.06347, equation 7), with DAPO's two clip ranges (arXiv 2503.14476, equation
10) and the dual clip for negative advantages (arXiv 1912.09729, equation 5); CISPO's clipped weight (arXiv 2506.13585,
equations 4 and 5); SAPO's soft gate (arXiv 2511.20347, equations 5 and 6); the three estimates of a KL divergence of
J. Schulman (http://joschu.net/blog/kl-approx.html).
"""

import torch
from torch import Tensor

from phalanx.functional.aggregation import ratio_metrics
from phalanx.functional.losses import spread
from phalanx.types import Metrics

KL_TYPES = ("k1", "k2", "k3")
KL_LOSS_TYPES = (*KL_TYPES, "k1+", "k3+")  # verl's names of the straight-through variants
LARGEST = 20.0  # bound of |ln rho|, so that exp does not overflow


def clipped_tokens(
    log_ratio: Tensor, advantage: Tensor, *, low: float, high: float, dual: float | None
) -> tuple[Tensor, Metrics]:
    """max(-A rho, -A clip(rho, 1 - low, 1 + high)), for A < 0 at most -A dual.

    Args:
        log_ratio: [B, A], ln rho.
        advantage: [B] (for all tokens of a sample) or [B, A].

    Returns:
        The loss per token [B, A] float32, and metrics: those of `ratio_metrics`, clipfrac_higher and clipfrac_lower
        (tokens above and below the range), and clipfrac (tokens whose gradient is clipped).
    """
    a = spread(advantage, log_ratio)
    ratio = torch.exp(log_ratio.clamp(-LARGEST, LARGEST))
    plain, clipped = -a * ratio, -a * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    if dual is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual), loss)
    clipped_ones = {"clipfrac": clipped > plain, "clipfrac_higher": ratio > 1 + high, "clipfrac_lower": ratio < 1 - low}
    return loss, ratio_metrics(log_ratio) | clipped_ones


def weighted_tokens(
    log_prob: Tensor, log_ratio: Tensor, advantage: Tensor, *, low: float | None, high: float
) -> tuple[Tensor, Metrics]:
    """-A w log p, with the detached weight w = clip(rho, 1 - low, 1 + high); low None: no lower bound.

    Shapes and results as in `clipped_tokens`; clipfrac has the tokens whose weight is clipped.
    """
    ratio = torch.exp(log_ratio.detach().clamp(-LARGEST, LARGEST))
    above, below = ratio > 1 + high, ratio < (0.0 if low is None else 1 - low)
    weight = ratio.clamp(None if low is None else 1 - low, 1 + high)
    clipped = {"clipfrac": above | below, "clipfrac_higher": above, "clipfrac_lower": below}
    return -spread(advantage, log_ratio) * weight * log_prob, ratio_metrics(log_ratio) | clipped


def gated_tokens(log_ratio: Tensor, advantage: Tensor, *, tau_pos: float, tau_neg: float) -> tuple[Tensor, Metrics]:
    """-A f(rho) with f(rho) = 4 / tau sigmoid(tau (rho - 1)), whose slope at rho = 1 is 1; tau is tau_pos for A > 0,
    else tau_neg.

    Shapes and results as in `clipped_tokens`, except that `gate`, the slope of f, replaces the clip fractions.
    """
    a = spread(advantage, log_ratio)
    ratio = torch.exp(log_ratio.clamp(-LARGEST, LARGEST))
    tau = torch.where(a > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1))
    return -a * 4 / tau * gate, ratio_metrics(log_ratio) | {"gate": 4 * gate * (1 - gate)}


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
