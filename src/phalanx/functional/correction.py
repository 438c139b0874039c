"""Importance weights for samples drawn by an engine with the policy's weights but other kernels.

rho = exp(d), d = log p_policy - log p_engine of an action.

For denoising steps both log-probabilities are means over the latent's dims, as everywhere here (with a sum over 10^5
dims rho would be useless). The limits of `truncated_is` and `rejection` therefore have the magnitude of PPO's clip
range, not of 1.

For tokens the limit is a ratio. Sources: truncated importance sampling of tokens and of sequences (F. Yao et al., "Your
efficient RL framework secretly brings you off-policy RL training", 2025; verl's rollout correction), and masks (IcePop,
arXiv 2510.18855, section 3.1).
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
