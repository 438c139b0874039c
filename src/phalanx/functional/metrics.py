"""Metrics as sums, which add up over micro-batches, updates and ranks and are divided once.

A metric is a mean over what counts: over the actions (tokens, denoising steps) whose weight in the loss is not 0, or
over the samples or units with such an action. A mean of micro-batches' means would depend on how samples are divided.

Shapes: U units of a micro-batch, B samples of these units, A actions of each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.types import Metric, Metrics

RATIO_ERROR = "ratio_error"  # the largest |rho - 1|: a maximum, also as a plain number


@dataclass
class Sums:
    """The sums of metrics by name, float64: a maximum [1]; of a mean the number of values and their sum [2]; of a std
    also the sum of their squares [3].
    """

    parts: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, metrics: Metrics, weight: Tensor) -> None:
        """Add the metrics of a micro-batch. weight: [U, A], 0 for actions that do not count.

        Raises:
            ValueError: for a metric of another shape.
        """
        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                metric = Metric(metric, "max" if name == RATIO_ERROR else "mean")
            self.merge([{name: _sums(name, metric, weight != 0)}])

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
                row[name] = max(squares[0] - mean**2, 0.0) ** 0.5 if squares else mean
        return row


def _sums(name: str, metric: Metric, counted: Tensor) -> Tensor:
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
    if metric.reduction == "max":
        return torch.where(mask, values, -torch.inf).amax().double()[None]
    kept = torch.where(mask, values, 0).double()  # where, since values that do not count may be NaN
    sums = [mask.sum().double(), kept.sum()]
    return torch.stack([*sums, kept.square().sum()] if metric.reduction == "std" else sums)
