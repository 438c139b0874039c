"""Aggregate the losses and the metrics of actions to one number each, for samples of different lengths.

The names are verl's (`loss_agg_mode`). With T actions and S samples that count, over all ranks, and l_i actions in
sample i, the loss is Σ weight · loss with

    token-mean               1 / T            mean over actions (DAPO, arXiv 2503.14476, equation 8)
    seq-mean-token-sum       1 / S            mean over samples of the sum over actions
    seq-mean-token-mean      1 / (S l_i)      mean over samples of the mean over actions (GRPO, 2402.03300, equation 3)
    seq-mean-token-sum-norm  1 / (S c)        c a constant (Dr.GRPO, arXiv 2503.20783, section 3.2)

T and S are counted over all ranks before the first backward pass, so the gradient does not depend on the number of
ranks.

A metric is a mean over what counts: over the actions (tokens, denoising steps) whose weight in the loss is not 0, or
over the samples or units with such an action. It is kept as sums, which add up over micro-batches, updates and ranks
and are divided once; a mean of micro-batches' means would depend on how samples are divided.

Shapes: U units of a micro-batch, B samples of these units, A actions of each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.types import Metric, Metrics


class Mean(float):
    """A mean that keeps the `count` of what it is over, so that means of parts merge into the mean of all."""

    count: float

    def __new__(cls, value: float, count: float) -> "Mean":
        mean = super().__new__(cls, value)
        mean.count = count
        return mean

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]  # for pickle
        return float(self), self.count


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
    """
    weight = (mask & kept[:, None]).float()
    if mode == "token-mean":
        return weight / actions
    if mode == "seq-mean-token-sum":
        return weight / samples
    if mode == "seq-mean-token-mean":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        return weight / lengths / samples
    assert mode == "seq-mean-token-sum-norm"  # of LOSS_AGG_MODES of phalanx.config.ranges
    return weight / (samples * (mask.shape[1] if constant is None else constant))


def ratio_metrics(log_ratio: Tensor) -> Metrics:
    """Metrics of rho from ln rho of any shape: ratio_error is |rho - 1|, which is exactly 0 in the first optimizer step
    if rollout and replay run with equal shapes, and approx_kl is rho - 1 - ln rho (Schulman's k3).
    """
    ratio, moved = torch.exp(log_ratio), torch.expm1(log_ratio)
    return {
        "ratio_mean": ratio,
        # of rho - 1, since squares of numbers near 1 would lose a small spread
        "ratio_std": Metric(moved, "std"),
        "ratio_error": Metric((ratio - 1).abs(), "first_max"),
        # expm1, since ratios are near 1, where rho - 1 would lose precision
        "approx_kl": moved - log_ratio,
    }


@dataclass
class Sums:
    """The sums of metrics by name, float64: a maximum [1]; of a mean the number of values and their sum [2]; of a std
    also the sum of their squares [3]. `first`: whether they are of the first optimizer step of a training step.
    """

    parts: dict[str, Tensor] = field(default_factory=dict)
    first: bool = True

    @torch.no_grad()
    def add(self, metrics: Metrics, weight: Tensor) -> None:
        """Add the metrics of a micro-batch. weight: [U, A], 0 for actions that do not count.

        Raises:
            ValueError: for a metric of another shape.
        """
        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                metric = Metric(metric)
            if metric.reduction == "first_max" and not self.first:
                continue
            label = f"first_{name}" if metric.reduction == "first_max" else name
            self.merge([{label: _metric_sums(name, metric, weight != 0)}])

    def merge(self, others: Iterable[Mapping[str, Tensor]]) -> None:
        """Add the parts of other sums."""
        for parts in others:
            for name, part in parts.items():
                known = self.parts.get(name)
                if known is not None:
                    part = torch.maximum(known, part) if len(part) == 1 else known + part
                self.parts[name] = part

    def values(self) -> dict[str, float]:
        """The metrics, without those of which no value counts."""
        row = {}
        for name, part in self.parts.items():
            first, *sums = part.tolist()
            if not sums and first != -torch.inf:
                row[name] = first
            elif sums and first > 0:
                mean, *squares = (value / first for value in sums)
                row[name] = max(squares[0] - mean**2, 0.0) ** 0.5 if squares else Mean(mean, first)
        return row


def _metric_sums(name: str, metric: Metric, counted: Tensor) -> Tensor:
    """[1], [2] or [3], see Sums: of the values of a micro-batch in which the actions `counted` [U, A] bool count."""
    values = metric.values
    if not isinstance(values, Tensor) or values.dim() == 0:  # a mean that the algorithm took counts once per action
        values = torch.zeros_like(counted, dtype=torch.float64) + values
    samples = counted.repeat_interleave(len(values) // len(counted), 0)  # [U, A] or [B, A]
    mask = samples if values.dim() > 1 else samples.any(1)
    if values.shape != mask.shape:
        raise ValueError(
            f"the algorithm's metric {name!r} has shape {list(values.shape)}; expected a number, or a value for each "
            f"action {list(counted.shape)} or each of the micro-batch's {len(counted)} units"
        )
    mask = mask if metric.where is None else mask & metric.where
    if metric.reduction in ("max", "first_max"):
        return torch.where(mask, values, -torch.inf).amax().double()[None]
    kept = torch.where(mask, values, 0).double()  # where, since values that do not count may be NaN
    sums = [mask.sum().double(), kept.sum()]
    return torch.stack([*sums, kept.square().sum()] if metric.reduction == "std" else sums)
