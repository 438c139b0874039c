"""DGPO: direct group preference optimisation (https://arxiv.org/abs/2510.08425).

    L = mean over prompts and noise levels of  -1 / beta log sigmoid(-beta mean over the group of A (e - e_ref))

with e = mean (v - u)^2 the error of the predicted velocity v at a freshly noised image, u = noise - image, A the
advantage of an image in its prompt's group, and ref the reference. This is Diffusion-DPO between the images with A > 0
and those with A < 0, each weighted by |A|; since the A of a group sum to 0, the unknown partition functions cancel. All
images of a prompt get the same noise at the same level, and are sampled with the ODE. An image has no gradient if
exp(e_old - e) is beyond 1 +- eps in the direction of its advantage.

Deviations from the paper and its authors' code:
1. The loss is divided by beta, so that its gradient in e_i is A_i sigmoid(beta mean A (e - e_ref)) / n, as in the code.
2. e_old is that of the policy before the first update of an epoch; the code uses a moving average of the policy.
3. If the rollout uses guidance, so do the trained velocities; the code samples with guidance but trains without, with
   a guided reference (its kl_cfg), as here with `reference_guidance`.
4. Levels are drawn as in the other algorithms on the forward process, and mapped to min_level .. 1; the code trains
   some of the first levels of its sampler.
5. Prompts whose images all have one reward are left out. Images without a reward are left out of their group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Optional

import torch
from torch import Tensor

from phalanx.algorithms._forward import ForwardAlgorithm, ForwardConfig, mean_square, shared_noise
from phalanx.config.fields import arg
from phalanx.functional.advantage import sorted_in_groups
from phalanx.functional.flow import FlowBatch, Noised
from phalanx.functional.preference import group_preference, mean_of_known
from phalanx.types import Metric, Metrics, Policy, Samples


@dataclass
class Config(ForwardConfig):
    """The configuration of `algorithm.name=dgpo`."""

    unused: ClassVar[tuple[str, ...]] = ("group_filter", "group_filter_k")

    beta: float = arg(
        100.0, "scale of the sigmoid: a larger beta reduces the gradient of correctly ranked groups sooner", gt=0
    )
    clip_ratio: Optional[float] = arg(
        1e-2, "eps: images whose exp(e_old - e) is beyond 1 +- clip_ratio have no gradient; null: all have", gt=0
    )
    reference_guidance: Optional[float] = arg(
        None, "scale of classifier-free guidance of the reference's velocities; null: that of the policy's", ge=1
    )
    min_level: float = arg(
        0.3, "smallest noise level that is trained: levels t become min_level + (1 - min_level) t", ge=0, lt=1
    )


class Algorithm(ForwardAlgorithm):
    """The learning rule: see phalanx.types.Algorithm. Each n consecutive rows of a Batch are the images of a prompt."""

    config: Config
    samples_per_unit = 0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.references = ("reference",) if config.clip_ratio is None else ("reference", "policy")

    def units(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[G, n]: all images of each prompt."""
        order, counts = sorted_in_groups(torch.zeros_like(reward), group_id)
        return order.view(len(counts), -1)

    def corrupt(self, policy: Policy, samples: Samples, seeds: Sequence[int]) -> Noised:
        """Draw fresh noise at levels in min_level .. 1."""
        noised, lowest = super().corrupt(policy, samples, seeds), self.config.min_level
        return replace(noised, levels=lowest + (1 - lowest) * noised.levels)

    def reference_output(self, policy: Policy, batch: FlowBatch) -> Tensor:
        """The velocities [B, W, ...] of other weights."""
        return super().reference_output(policy, _share_noise(batch))

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [G, W] of each group, and its metrics."""
        batch = _share_noise(batch)
        velocity, target = policy.predict(batch.trace, batch.corrupted), batch.corrupted.target(batch.trace.clean)
        error = mean_square(velocity - target)  # [B, W]
        reference = batch.reference_outputs["reference"]
        stats: Metrics = {}
        if self.config.clip_ratio is not None:
            old_error = mean_square(batch.reference_outputs["policy"] - target)
            # outside the clip range, in the direction of the advantage
            ratio, better = torch.exp(old_error - error.detach()), batch.advantage[:, None] > 0
            beyond = torch.where(better, ratio > 1 + self.config.clip_ratio, ratio < 1 - self.config.clip_ratio)
            error, stats["clipfrac"] = torch.where(beyond, error.detach(), error), Metric(beyond, where=batch.mask)
        # [B, W] -> [G, n, W]: the images of a group are consecutive rows
        groups = (len(batch.weight), -1)
        known = batch.mask.any(1)  # [B]: images with a reward
        loss, preferred = group_preference(
            error.unflatten(0, groups),
            mean_square(reference - target).unflatten(0, groups),
            batch.advantage.unflatten(0, groups),
            beta=self.config.beta,
            known=known.unflatten(0, groups),
        )
        if self.config.kl_loss_coef > 0:
            distance = mean_of_known(mean_square(velocity - reference).unflatten(0, groups), known.unflatten(0, groups))
            loss, stats["kl_ref"] = loss + self.config.kl_loss_coef * distance, distance
        return loss, stats | preferred


def _share_noise(batch: FlowBatch) -> FlowBatch:
    """The batch with the noise and levels of each group's first image for the whole group."""
    return shared_noise(batch, len(batch.advantage) // len(batch.weight))
