"""Noise levels for training on the forward process."""

import torch
from torch import Tensor


def noise_levels(uniform: Tensor, count: int, schedule: Tensor, *, distribution: str, shift: float) -> Tensor:
    """The levels [B, count] of B samples, from uniform random numbers.

    Args:
        uniform: [B, >= max(count, len(schedule))] random numbers in [0, 1).
        schedule: [N] noise levels of the rollout's steps, without the final 0.
        distribution: "schedule": levels of the schedule in random order, repeated only after all were used; "uniform"
            or "logit_normal" (SD3, arXiv 2403.03206, section 3.1), both shifted by s = `shift`: s t / (1 + (s - 1) t).

    Raises:
        ValueError: for an unknown distribution.
    """
    if distribution == "schedule":
        n = len(schedule)
        order = torch.argsort(uniform[:, :n], dim=1)
        return schedule[order[:, torch.arange(count) % n]]
    if distribution not in ("uniform", "logit_normal"):
        raise ValueError(f"noise_levels: distribution {distribution!r} should be schedule, uniform or logit_normal")
    t = uniform[:, :count]
    if distribution == "logit_normal":
        # inverse normal CDF; the bounds keep 0 and 1, where it is infinite, out of reach
        t = torch.sigmoid(torch.special.ndtri(t.double().clamp(2**-25, 1 - 2**-25))).float()
    return shift * t / (1 + (shift - 1) * t)
