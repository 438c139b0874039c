"""Importance weights for samples drawn by an engine with the policy's weights but other kernels, and how far the
log-probabilities of a sampler and of a trainer are apart.

rho = exp(d), d = log p_policy - log p_engine of an action.

For denoising steps both log-probabilities are means over the latent's dims, as everywhere here (with a sum over 10^5
dims rho would be useless). The limits of `truncated_is` and `rejection` therefore have the magnitude of PPO's clip
range, not of 1.

For tokens the limit is a ratio. Sources: truncated importance sampling of tokens and of sequences (F. Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025; verl's rollout correction), and masks (IcePop,
arXiv 2510.18855, section 3.1).

Shapes: B or N samples, A actions per sample (denoising steps or tokens).
"""

import torch
from torch import Tensor

LARGEST = 20.0  # bound of |d| summed over a response, so that exp does not overflow
MOST = 1e6  # bound of |d| of an action, also for ratios of 0 and infinity


def log_ratios(policy: Tensor, engine: Tensor, mask: Tensor) -> Tensor:
    """d [B, A] from two log-probabilities [B, A]; 0 outside of mask [B, A] bool, and if both are -inf, whose difference
    is undefined.
    """
    return torch.where(mask & (policy != engine), policy - engine, 0.0)


def correction_weight(policy: Tensor, engine: Tensor, mask: Tensor, *, kind: str, limit: float) -> Tensor:
    """Factors [B, A] of the surrogate loss, from two log-probabilities [B, A] of the actions in mask [B, A].

    - `rescore` and `none`: 1.
    - `truncated_is`: min(rho, exp(limit)); `rejection`: 1 if |d| <= limit, else 0.
    - `token_tis`: min(rho, limit); `sequence_tis`: min(product of a response's rho, limit).
    - `token_mask`: rho if 1 / limit <= rho <= limit, else 0; `sequence_mask`: 1 if the geometric mean of a response's
      rho is in this range, else 0.
    """
    d = log_ratios(policy, engine, mask)
    if kind in ("rescore", "none"):
        return torch.ones_like(d)
    if kind == "truncated_is":
        return torch.exp(d.clamp(max=limit))
    if kind == "rejection":
        return (d.abs() <= limit).float()
    if kind == "token_tis":
        return torch.exp(d.clamp(max=LARGEST)).clamp(max=limit)
    if kind == "token_mask":
        rho = torch.exp(d.clamp(-LARGEST, LARGEST))
        return torch.where((rho >= 1 / limit) & (rho <= limit), rho, 0.0)
    # clamped to finite values, so that no sum has both inf and -inf
    total = d.clamp(-MOST, MOST).sum(1, keepdim=True)
    if kind == "sequence_tis":
        return torch.exp(total.clamp(-LARGEST, LARGEST)).clamp(max=limit).expand_as(d)
    assert kind == "sequence_mask"  # of CORRECTIONS and TOKEN_CORRECTIONS of phalanx.config.ranges
    rho = torch.exp((total / mask.sum(1, keepdim=True).clamp(min=1)).clamp(-LARGEST, LARGEST))
    return ((rho >= 1 / limit) & (rho <= limit)).float().expand_as(d)


FINITE = torch.finfo(torch.double).max  # in place of infinity and of what is not a number, for JSON
EACH = 16  # up to so many actions of a sample are listed one by one


def mismatch(log_ratio: Tensor, mask: Tensor, clip: float) -> dict[str, float]:
    """Statistics of |ratio - 1| over the actions in mask [N, A] bool, for log_ratio [N, A] = trainer's minus sampler's
    log-probability, which is not a number where one of them is infinite.

    median, p99 and largest of |ratio - 1|; the shares of actions, and of samples with at least one, whose ratio is
    further than `clip` from 1; k1 and k3: Schulman's estimates of KL(sampler, trainer) per action.
    """
    d = log_ratio.double()
    error = torch.expm1(d).abs().nan_to_num(FINITE)
    far, real = (error > clip) & mask, error[mask]
    if not len(real):
        return {}
    order = real.sort().values
    values = {
        "median": order[(len(order) - 1) // 2],
        "p99": order[-(-99 * len(order) // 100) - 1],
        "largest": order[-1],
        "actions_clipped": far.sum() / mask.sum(),
        "samples_clipped": far.any(1).sum() / mask.any(1).sum(),
        "k1": -d[mask].mean(),
        "k3": (torch.expm1(d) - d)[mask].mean(),
    }
    return {name: float(value.nan_to_num(FINITE)) for name, value in values.items()} | {"actions": float(len(real))}


def by_position(log_ratio: Tensor, mask: Tensor, clip: float) -> list[dict[str, float]]:
    """`mismatch` of each action, or of 0, 1, 2 to 3, 4 to 7, and so on if samples have many: `first` to `last`."""
    width = mask.shape[1]
    starts = list(range(width)) if width <= EACH else [0, *(2**i for i in range(width.bit_length()) if 2**i < width)]
    rows = []
    for first, end in zip(starts, [*starts[1:], width], strict=True):
        part = mismatch(log_ratio[:, first:end], mask[:, first:end], clip)
        if part:
            rows.append({"first": float(first), "last": float(end - 1), **part})
    return rows
