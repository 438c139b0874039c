"""Reward-weighted regression: flow matching on the policy's own images, weighted by their reward.

    w_i = n exp(A_i / tau) / (sum of exp(A_j / tau) over the n images of the prompt)
    L = mean over samples and noise levels of  w mean (v - u)^2 + lambda mean (v - v_ref)^2,   u = noise - x_0

Source: online reward-weighted conditional flow matching (https://arxiv.org/abs/2502.06061), whose bound of the
Wasserstein distance is the penalty with lambda; reward-weighted regression is Peters and Schaal's (2007).

Deviations from the paper:
1. Weights depend on the group-relative advantage, not on the reward, and their mean over a prompt's images is 1, so
   that hard and easy prompts count equally.
2. Images of a prompt whose rewards are all equal have weight 0 and do not count in the mean's denominator.
"""

from dataclasses import dataclass

from torch import Tensor

from phalanx.algorithms._forward import ForwardAlgorithm, ForwardConfig, mean_square
from phalanx.config.fields import arg
from phalanx.functional.advantage import group_weights
from phalanx.functional.flow import FlowBatch
from phalanx.types import Metrics, Policy


@dataclass
class Config(ForwardConfig):
    """The configuration of `algorithm.name=rwr`."""

    temperature: float = arg(1.0, "tau: the smaller, the more the best image of a prompt counts", gt=0)


class Algorithm(ForwardAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] the weights w, which depend on the whole group and so are computed over all ranks' samples."""
        values = super().advantage(reward, group_id) / self.config.temperature
        return group_weights(values, group_id, self.sample_mask(reward, group_id))

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [B, W] per sample and noise level, before its weight, and metrics."""
        velocity = policy.predict(batch.trace, batch.corrupted)
        error = mean_square(velocity - batch.corrupted.target(batch.trace.clean))
        return self.penalise(batch.advantage[:, None] * error, velocity, batch, {"flow_loss": error})
