"""Diffusion-DPO: direct preference optimisation of diffusion models (https://arxiv.org/abs/2311.12908).

    L = mean over pairs and noise levels of  -log sigmoid(-beta / 2 [(e_w - e_w_ref) - (e_l - e_l_ref)])

with e = mean (v - u)^2 the error of the predicted velocity v at a freshly noised image, u = noise - image its target, w
the preferred image of a pair and l the other, and ref the reference. Both images of a pair get the same noise at the
same level.

Deviations from the paper:
1. The pair is the best and the worst image of each prompt, by reward. With rollout.engine=dataset and the reward
   `preferred` it is a pair of the data, as in the paper.
2. The loss is written for velocities. As in the authors' code, beta includes the paper's T and its weight of the noise
   level, and e is a mean over dims.
3. If the rollout uses guidance, so do the trained velocities, since the guided model is the policy. Guidance 1 is the
   paper's method.
4. Each pair is trained at `train_timesteps` levels at once, drawn by `level_distribution`.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phalanx.algorithms._bases import OF_ADVANTAGES
from phalanx.algorithms._forward import ForwardAlgorithm, ForwardConfig, mean_square, shared_noise
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowBatch
from phalanx.functional.preference import best_and_worst, dpo_loss
from phalanx.types import Metrics, Policy


@dataclass
class Config(ForwardConfig):
    """The configuration of `algorithm.name=diffusion_dpo`."""

    unused: ClassVar[tuple[str, ...]] = OF_ADVANTAGES

    beta: float = arg(2000.0, "weight of the difference between a pair's errors", gt=0)


class Algorithm(ForwardAlgorithm):
    """The learning rule: see phalanx.types.Algorithm. Rows 2 j and 2 j + 1 of a Batch are a pair, preferred first."""

    config: Config
    samples_per_unit = 2
    references = ("reference",)

    def units(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[G, 2]: the best and the worst image of each prompt."""
        return best_and_worst(reward, group_id)

    def reference_output(self, policy: Policy, batch: FlowBatch) -> Tensor:
        """The velocities [B, W, ...] of other weights."""
        return super().reference_output(policy, shared_noise(batch, 2))

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [B / 2, W] of each pair, and its metrics."""
        batch = shared_noise(batch, 2)
        velocity = policy.predict(batch.trace, batch.corrupted)
        reference = batch.reference_outputs["reference"]
        target = batch.corrupted.target(batch.trace.clean)
        # [B, W] -> [B / 2, 2, W]: the images of a pair are consecutive rows
        error = mean_square(velocity - target).unflatten(0, (-1, 2))
        reference_error = mean_square(reference - target).unflatten(0, (-1, 2))
        loss, stats = dpo_loss(error, reference_error, beta=self.config.beta)
        if self.config.kl_loss_coef > 0:
            distance = mean_square(velocity - reference).unflatten(0, (-1, 2)).mean(1)
            loss = loss + self.config.kl_loss_coef * distance
            stats["kl_ref"] = distance
        return loss, stats
