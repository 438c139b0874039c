"""The base class of algorithms on the forward process: fresh noise, and a penalty on the distance to the reference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.algorithms._bases import GroupAlgorithm, GroupConfig
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowBatch, Noised
from phalanx.types import Metrics, Policy, Samples


@dataclass
class ForwardConfig(GroupConfig):
    """The configuration shared by all algorithms on the forward process."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"rollout.noise_level": 0.0}  # images come from the ODE

    train_timesteps: int = arg(2, "noise levels at which each image is trained in a pass", ge=1)
    level_distribution: str = arg(
        "schedule",
        "noise levels: those of the rollout's own schedule without repetition, or drawn uniformly or logit-normally",
        choices=("schedule", "uniform", "logit_normal"),
    )
    kl_loss_coef: float = arg(0.0, "weight of mean (v - v_ref)^2; 0 runs no reference at all", ge=0)


class ForwardAlgorithm(GroupAlgorithm):
    """An algorithm that regresses the velocity of freshly noised images."""

    def __init__(self, config: ForwardConfig) -> None:
        super().__init__(config)
        self.levels = config.train_timesteps

    def corrupt(self, policy: Policy, samples: Samples, seeds: Sequence[int]) -> Noised:
        """Draw fresh noise for the final latents, at `algorithm.train_timesteps` levels each."""
        c = self.config
        noised: Noised = policy.corrupt(samples, seeds, levels=c.train_timesteps, distribution=c.level_distribution)
        return noised

    def reference_output(self, policy: Policy, batch: FlowBatch) -> Tensor:
        """The velocities [B, W, ...] of other weights at the same noised images."""
        return policy.predict(batch.trace, batch.corrupted)

    def penalise(self, loss: Tensor, velocity: Tensor, batch: FlowBatch, stats: Metrics) -> tuple[Tensor, Metrics]:
        """Add the penalty lambda mean (v - v_ref)^2 on velocities [B, W, ...] to the loss [B, W]."""
        if "reference" not in batch.reference_outputs:
            return loss, stats
        distance = mean_square(velocity - batch.reference_outputs["reference"])
        return loss + self.config.kl_loss_coef * distance, stats | {"kl_ref": distance}


def mean_square(difference: Tensor) -> Tensor:
    """[B, W, ...] -> [B, W]: the mean square over a latent's dims, in float32."""
    return torch.square(difference.float()).flatten(2).mean(2)


def shared_noise(batch: FlowBatch, size: int) -> FlowBatch:
    """The batch with the noise and levels of the first sample of each unit (`size` samples) for the whole unit."""
    first = torch.arange(len(batch.corrupted.levels), device=batch.corrupted.levels.device) // size * size
    return replace(batch, corrupted=batch.corrupted.select(first))
