"""Returns and advantages per token, and the critic's loss.

Sources: generalised advantage estimation (arXiv 1506.02438, equations 11 and 16); whitening over the whole batch
(REINFORCE++, arXiv 2501.03262); the clipped value loss of PPO's authors' code, whose range verl calls cliprange_value.

Shapes: B samples of this rank, A tokens of the longest response. Tokens outside of a mask [B, A] are skipped, and their
results are 0. `total` sums a CPU tensor over all ranks.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from phalanx.types import Metrics

EPS = 1e-8  # added to the variance


def at_last(reward: Tensor, mask: Tensor) -> Tensor:
    """[B, A] the rewards [B] at the last token in each sample's mask, 0 elsewhere."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(last, reward[:, None], 0.0)


def placed(reward: Tensor, earned: Tensor | None, mask: Tensor) -> Tensor:
    """[B, A] the rewards [B] divided over tokens: parts `earned` [B, A] at their tokens, the rest at the last token."""
    if earned is None:
        return at_last(reward, mask)
    parts = torch.where(mask, earned, 0.0).double()  # double, so that the remainder is exact
    return (parts + at_last(reward.double() - parts.sum(1), mask)).float()


def gae(reward: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages and returns of tokens.

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t

    Args:
        reward, values: [B, A]; V is 0 after the last token.
        mask: [B, A] bool.

    Returns:
        A and R, [B, A] float32. With values of 0 and lam = 1, both are the discounted sums of rewards.
    """
    r, v = reward.double(), values.double()
    later, value = r.new_zeros(len(r)), r.new_zeros(len(r))  # A and V of the next token
    steps = []
    for t in range(r.shape[1] - 1, -1, -1):
        real = mask[:, t]
        now = r[:, t] + gamma * value - v[:, t] + gamma * lam * later
        later, value = torch.where(real, now, later), torch.where(real, v[:, t], value)
        steps.append(torch.where(real, now, 0.0))
    advantage = torch.stack(steps[::-1], 1) if steps else r
    return advantage.float(), torch.where(mask, advantage + v, 0.0).float()


def moments(values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Mean and population variance of the values [B, A] in the masks of all ranks; zeros if these are empty."""
    real = values[mask].double()
    count, summed = total(torch.stack([real.new_tensor(float(len(real))), real.sum()]).cpu()).tolist()
    mean = summed / max(count, 1.0)
    (squares,) = total(((real - mean) ** 2).sum()[None].cpu()).tolist()
    return mean, squares / max(count, 1.0)


def whitened(values: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """[B, A] float32: (values - mean) / sqrt(variance + EPS), over the masks of all ranks."""
    mean, variance = moments(values, mask, total)
    scaled = (values.double() - mean) / (variance + EPS) ** 0.5
    return torch.where(mask, scaled, 0.0).float()


def value_loss(values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None) -> tuple[Tensor, Metrics]:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 per token; without `clip` only the first term.

    Args:
        values, old, returns: [B, A], the current values V, those from which the returns were computed, and R.

    Returns:
        The loss [B, A], and metrics: vf_loss (the same), and vf_clipfrac (tokens whose gradient is clipped).
    """
    plain = (values - returns) ** 2
    worst = plain
    if clip is not None:
        worst = torch.maximum(plain, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
    return worst / 2, {"vf_loss": worst / 2, "vf_clipfrac": worst > plain}
