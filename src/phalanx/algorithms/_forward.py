"""What algorithms on the forward process share: fresh noise at some levels, a penalty on leaving the reference."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.algorithms._group import GroupConfig, GroupRule
from phalanx.config.load import arg
from phalanx.config.schema import RolloutConfig
from phalanx.types import Batch, Policy


@dataclass
class ForwardConfig(GroupConfig):
    """Keys of `algorithm` that all algorithms on the forward process have."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"rollout.noise_level": 0.0}  # images come from the ODE

    train_timesteps: int = arg(2, "noise levels at which each image is trained in a pass", ge=1)
    level_distribution: str = arg(
        "schedule",
        "noise levels: those of the rollout's own schedule without repetition, or drawn uniformly or logit-normally",
        choices=("schedule", "uniform", "logit_normal"),
    )
    kl_loss_coef: float = arg(0.0, "weight of mean (v - v_ref)^2; 0 runs no reference at all", ge=0)

    def trained_steps(self, rollout: RolloutConfig) -> int:
        """Noise levels of each image."""
        return self.train_timesteps


class ForwardRule(GroupRule):
    """An algorithm that regresses the velocity at freshly noised images."""

    forward = True

    def __init__(self, config: ForwardConfig) -> None:
        super().__init__(config)
        self.penalty = config.kl_loss_coef
        self.others = ("reference",) if self.penalty > 0 else ()

    def view(self, policy: Policy, batch: Batch) -> Tensor:
        """The velocities [B, W, ...] of other weights at the same noised images."""
        assert batch.noised is not None
        return policy.predict(batch.trace, batch.noised)

    def penalise(
        self, loss: Tensor, velocity: Tensor, batch: Batch, stats: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [B, W] with the penalty on velocities [B, W, ...] that differ from the reference's."""
        if "reference" not in batch.views:
            return loss, stats
        distance = mean_square(velocity - batch.views["reference"])
        return loss + self.penalty * distance, stats | {"kl_ref": distance.detach().mean()}


def mean_square(difference: Tensor) -> Tensor:
    """[B, W, ...] -> [B, W]: the mean over a latent's dims of the square, float32."""
    return torch.square(difference.float()).flatten(2).mean(2)
