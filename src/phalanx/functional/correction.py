"""Weights of samples that another engine drew, with the policy's weights but other kernels.

rho = exp(d), d = log p_policy - log p_engine of a step, both averaged over the latent's dims as all
log-probabilities are here (a sum over 10^5 dims would make rho useless). So the limits are of the
size of PPO's clip range, not of 1.
"""

import torch
from torch import Tensor

from phalanx.config.run import CORRECTIONS


def correction_weight(policy: Tensor, engine: Tensor, *, kind: str, limit: float) -> Tensor:
    """Factors of the loss from the two log-probabilities [B, W] of the same steps.

    `truncated_is`: rho, at most exp(limit) (truncated importance sampling); `rejection`: 1 where
    |d| <= limit, else 0; `rescore` and `none`: 1.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in CORRECTIONS:
        raise ValueError(f"correction_weight: kind {kind!r} should be one of {', '.join(CORRECTIONS)}")
    logprob_diff = policy - engine
    if kind == "truncated_is":
        return torch.exp(logprob_diff.clamp(max=limit))
    if kind == "rejection":
        return (logprob_diff.abs() <= limit).float()
    return torch.ones_like(logprob_diff)
