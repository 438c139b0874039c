"""The samples of one rank, cut into the batches of its forward and backward passes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.types import Batch, Noised, Samples, select


@dataclass
class MicroBatches:
    """This rank's B samples with all that a Batch has of them.

    advantage [B]. `views` [B, ...] of other weights, by name; `noised` where a forward-process algorithm trains.
    """

    samples: Samples
    advantage: Tensor
    device: torch.device
    views: dict[str, Tensor] = field(default_factory=dict)
    noised: Noised | None = None

    def select(self, rows: Tensor, weight: Tensor, window: int) -> Batch:
        """The batch of the samples in `rows` [b]; weight [u] is that of its units in each of `window` trained steps."""
        samples, noised = self.samples, self.noised
        assert samples.log_prob is not None
        assert samples.weight is None or len(weight) == len(rows), "corrections are of single samples"
        at = rows.to(self.device)
        weights = weight.to(self.device)[:, None].expand(-1, window)
        return Batch(
            trace=select(samples.trace, at),
            log_prob=samples.log_prob[at],
            advantage=self.advantage.to(self.device)[at],
            weight=weights if samples.weight is None else weights * samples.weight[at],
            views={name: values[at] for name, values in self.views.items()},
            noised=None if noised is None else Noised(noised.noise[at], noised.levels[at]),
        )
