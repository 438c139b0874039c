"""How far the log-probabilities of a sampler and of a trainer are apart, for the same actions under the same weights.

Shapes: N samples, A actions per sample (denoising steps or tokens).
"""

import torch
from torch import Tensor

MOST = torch.finfo(torch.double).max  # in place of infinity and of what is not a number, for JSON
EACH = 16  # up to so many actions of a sample are listed one by one


def mismatch(log_ratio: Tensor, mask: Tensor, clip: float) -> dict[str, float]:
    """Statistics of |ratio - 1| over the actions in mask [N, A] bool, for log_ratio [N, A] = trainer's minus sampler's
    log-probability, which is not a number where one of them is infinite.

    median, p99 and largest of |ratio - 1|; the shares of actions, and of samples with at least one, whose ratio is
    further than `clip` from 1; k1 and k3: Schulman's estimates of KL(sampler, trainer) per action.
    """
    d = log_ratio.double()
    error = torch.expm1(d).abs().nan_to_num(MOST)
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
    return {name: float(value.nan_to_num(MOST)) for name, value in values.items()} | {"actions": float(len(real))}


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
