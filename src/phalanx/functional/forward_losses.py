"""Losses on the forward process: the model regresses the velocity u = noise - x_0 of freshly noised images
x_t = (1 - t) x_0 + t noise. All values are float32.
"""

import torch
from torch import Tensor

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
