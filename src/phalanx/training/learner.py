"""A trained model with all that its training keeps: the optimizer's state and copies of the weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.config.run import EmaConfig, OptimConfig
from phalanx.distributed.fsdp import local
from phalanx.models.trained import TrainedModel
from phalanx.training.checkpoint import trained_state
from phalanx.training.optim import Average, Ema, Optimizer


class Learner:
    """One entry of a checkpoint. A job has one for its policy, and further ones where it trains other models beside it.

    `averages` are copies of the weights by name, which begin as the weights are now; `ema` is the one of `EmaConfig`,
    None where its decay is. The model can be used with any of them (TrainedModel.using).
    """

    def __init__(
        self,
        model: TrainedModel,
        optim: OptimConfig,
        total_updates: int,
        *,
        ema: EmaConfig | None = None,
        averages: Sequence[str] = (),
        offload: bool = False,
    ) -> None:
        """`total_updates`: optimizer steps of the whole run; with `offload`, states and copies are kept on the CPU."""
        self.model, self.optim_name = model, optim.name
        self.optimizer = Optimizer(optim, model.sharded, total_updates, offload=offload)
        self.ema: Ema | None = None
        if ema is not None and ema.decay is not None:
            self.ema = Ema(ema, model.parameters, offload=offload)
            model.add_weights("ema", self.ema.values)
        self.averages = {name: Average(model.parameters, offload=offload) for name in averages}
        for name, average in self.averages.items():
            model.add_weights(name, average.values)

    @property
    def updates(self) -> int:
        """Optimizer steps taken since the run began."""
        return self.optimizer.updates

    def step(self, loss: Tensor) -> dict[str, float | Tensor]:
        """Apply the gradients that the backward passes left; `loss` is this rank's sum of them.

        An update with NaN or infinity in the gradient, or in any rank's loss, is skipped on all ranks. Returns
        grad_norm, lr, and `skipped`.
        """
        stats = self.optimizer.step(loss)
        if not stats["skipped"] and self.ema is not None:
            self.ema.after_update(self.optimizer.updates)
        return stats

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds, as tensors of the mesh: to save, or to load into."""
        copies = {name: average.values for name, average in self.averages.items()}
        if self.ema is not None:
            copies["ema"] = self.ema.values
        return trained_state(self.model.parameters, self.optimizer.state(), copies)

    def not_finite(self) -> str | None:
        """The name of a tensor of weights or averages of which this rank's part holds NaN or infinity; None: none."""
        copies = [average.values for average in self.averages.values()]
        if self.ema is not None:
            copies.append(self.ema.values)
        for tensors in (self.model.parameters, *copies):
            fine = [local(tensor).isfinite().all() for tensor in tensors.values()]
            if not torch.stack(fine).all():  # one wait for the device, not one a tensor
                return next(name for name, ok in zip(tensors, fine, strict=True) if not ok)
        return None

    def loaded(self, updates: int) -> None:
        """After a checkpoint was loaded into `state`, of a run with so many optimizer steps."""
        self.model.sharded.copy_to_module()
        self.optimizer.updates = updates

    def signature(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this model to be loaded into it."""
        return {
            "trained tensors": len(self.model.parameters),
            "trained parameters": sum(p.numel() for p in self.model.parameters.values()),
            "lora_rank": self.model.config.lora_rank,
            "moving average": self.ema is not None,
            "other weights": ", ".join(sorted(self.averages)) or "none",
            "optimizer": self.optim_name,
        }
