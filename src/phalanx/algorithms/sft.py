"""Best of n: supervised fine-tuning on the policy's own best images, as a baseline.

    L = mean over the k best images of each prompt and noise levels of  mean (v - u)^2 + lambda mean (v - v_ref)^2

with u = noise - x_0. This is RAFT (https://arxiv.org/abs/2304.06767) with the flow-matching loss of rectified flow
(SD3, https://arxiv.org/abs/2403.03206).

Deviation from the paper: prompts whose images all have equal rewards are left out, since none of them is the best.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phalanx.algorithms._bases import OF_ADVANTAGES
from phalanx.algorithms._forward import ForwardAlgorithm, ForwardConfig, mean_square
from phalanx.config.fields import arg
from phalanx.functional.advantage import best_of_group
from phalanx.functional.flow import FlowBatch
from phalanx.types import Metrics, Policy


@dataclass
class Config(ForwardConfig):
    """The configuration of `algorithm.name=sft`."""

    unused: ClassVar[tuple[str, ...]] = OF_ADVANTAGES

    best: int = arg(1, "number of images per prompt to train on, those with the highest rewards", ge=1)


class Algorithm(ForwardAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def sample_mask(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] bool: the best of each group whose rewards differ; among equal rewards, the first ones."""
        return best_of_group(reward, group_id, self.config.best)

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [B, W] per sample and noise level, before its weight, and metrics."""
        velocity = policy.predict(batch.trace, batch.corrupted)
        error = mean_square(velocity - batch.corrupted.target(batch.trace.clean))
        return self.penalise(error, velocity, batch, {"flow_loss": error})
