"""Aggregate the losses of actions to one number, for samples of different lengths.

The names are verl's (`loss_agg_mode`). With T actions and S samples that count, over all ranks, and l_i actions in
sample i, the loss is Σ weight · loss with

    token-mean               1 / T            mean over actions (DAPO, arXiv 2503.14476, equation 8)
    seq-mean-token-sum       1 / S            mean over samples of the sum over actions
    seq-mean-token-mean      1 / (S l_i)      mean over samples of the mean over actions (GRPO, 2402.03300, equation 3)
    seq-mean-token-sum-norm  1 / (S c)        c a constant (Dr.GRPO, arXiv 2503.20783, section 3.2)

T and S are counted over all ranks before the first backward pass, so the gradient does not depend on the number of
ranks.
"""

import torch
from torch import Tensor


def count_actions(mask: Tensor, kept: Tensor) -> Tensor:
    """[2] int64: T and S of this rank.

    Args:
        mask: [U, A] bool, the real actions of U units.
        kept: [U] bool, the units that count.
    """
    real = mask & kept[:, None]
    return torch.stack([real.sum(), real.any(1).sum()])


def action_weights(
    mask: Tensor, kept: Tensor, actions: int, samples: int, *, mode: str, constant: float | None = None
) -> Tensor:
    """The weight [U, A] float32 of each action; 0 for padding and for units that do not count.

    Args:
        mask: [U, A] bool, the real actions of U units.
        kept: [U] bool, the units that count.
        actions: T over all ranks.
        samples: S over all ranks.
        mode: one of the names above.
        constant: c of seq-mean-token-sum-norm; None: A.

    Raises:
        ValueError: for an unknown mode.
    """
    weight = (mask & kept[:, None]).float()
    if mode == "token-mean":
        return weight / actions
    if mode == "seq-mean-token-sum":
        return weight / samples
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        return weight / lengths / samples
    if mode == "seq-mean-token-sum-norm":
        return weight / (samples * (mask.shape[1] if constant is None else constant))
    raise ValueError(f"action_weights: unknown mode {mode!r}")
