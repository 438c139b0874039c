"""Policy losses from likelihood ratios rho: per token, and per sample and trained step of Gaussian transitions;
and losses on the forward process, where the model regresses the velocity u = noise - x_0 of freshly noised images x_t =
(1 - t) x_0 + t noise. All values are float32.

Sources: PPO's clipped surrogate (arXiv 1707.06347, equation 7; of transitions: equation (5) of Flow-GRPO, arXiv
2505.05470), with DAPO's two clip ranges (arXiv 2503.14476, equation 10) and the dual clip for negative advantages
(arXiv 1912.09729, equation 5); CISPO's clipped weight (arXiv 2506.13585, equations 4 and 5); SAPO's soft gate (arXiv
2511.20347, equations 5 and 6); the three estimates of a KL divergence of J. Schulman
(http://joschu.net/blog/kl-approx.html); GRPO-Guard (arXiv 2510.22319); Flow-DPPO (arXiv 2606.11025); the step weights
of TempFlow-GRPO (arXiv 2508.04324).
"""

import torch
from torch import Tensor

from phalanx.functional.aggregation import ratio_metrics
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


SMALLEST_ERROR = 1e-5  # lower bound of the adaptive weight's denominator, as in DiffusionNFT's code


def optimality(advantage: Tensor, limit: float) -> Tensor:
    """The probability [...] that an image with advantage A [...] is a good one: clip(A, -limit, limit) / (2 limit) +
    1/2, in 0..1 (DiffusionNFT, arXiv 2509.16117).
    """
    return (advantage.float().clamp(-limit, limit) / (2 * limit) + 0.5).clamp(0, 1)


def negative_aware(
    velocity: Tensor, old: Tensor, target: Tensor, levels: Tensor, good: Tensor, *, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """DiffusionNFT's loss (arXiv 2509.16117, equation 5), in x_0-space, with adaptive weights.

        v+ = beta v + (1 - beta) v_old,   v- = (1 + beta) v_old - beta v,   x0+- = x_t - t v+-
        l+- = mean of (x0+- - x_0)^2 / max(mean |x0+- - x_0|, 1e-5), the denominator without a gradient
        loss = (good l+ + (1 - good) l-) / beta

    Args:
        velocity: [B, W, ...], v of the policy; only this has a gradient.
        old: [B, W, ...], v_old of the weights that sampled.
        target: [B, W, ...], u.
        levels: [B, W], t.
        good: [B], see `optimality`.
        beta: distance of the implicit policies v+ and v- from the old one; with 1, v+ is the policy itself.

    Returns:
        The loss [B, W], and its branches l+ and l- [B, W].
    """
    v, v_old, u = velocity.float(), old.detach().float(), target.float()
    positive = _squared_in_x0(beta * v + (1 - beta) * v_old - u, levels)
    negative = _squared_in_x0((1 + beta) * v_old - beta * v - u, levels)
    r = good.float()[:, None]
    return (r * positive + (1 - r) * negative) / beta, positive, negative


def _squared_in_x0(error: Tensor, levels: Tensor) -> Tensor:
    """[B, W] weighted squared errors of x_0 = x_t - t v, which are t times the errors [B, W, ...] of v."""
    e = (levels.float()[..., None] * error.flatten(2)).abs()
    weight = e.detach().mean(2).clamp(min=SMALLEST_ERROR)
    return torch.square(e).mean(2) / weight
