"""Advantage weighted matching: the policy gradient with flow matching's loss (https://arxiv.org/abs/2509.25050).

    rho = exp(mean (v_old - u)^2 - mean (v - u)^2),   u = noise - x_0
    L = mean over samples and noise levels of  max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + lambda mean (v - v_ref)^2

The negative flow matching loss replaces the log-likelihood of an image, at any noise level and with any sampler. v_old
is the prediction of the policy before the first update of an epoch, at the same noise and levels.

Deviations from the paper and its authors' code:
1. Noise levels have equal weights, as in the paper; the authors' recipes weight by t times a power of the error.
2. There is no second penalty on the distance to a moving average of the policy.
3. The authors' recipes scale advantages by 1/5 and divide by the std of all rewards (algorithm.global_std=true).
4. Samples of a group whose rewards are all equal have weight 0 and do not count in the mean's denominator.
5. With actor.ppo_epochs > 1 the old predictions are computed before each epoch, since each has fresh noise.
"""

from dataclasses import dataclass

from torch import Tensor

from phalanx.algorithms._forward import ForwardAlgorithm, ForwardConfig, mean_square
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowBatch
from phalanx.functional.losses import clipped_surrogate
from phalanx.types import Metrics, Policy


@dataclass
class Config(ForwardConfig):
    """The configuration of `algorithm.name=awm`."""

    clip_ratio: float = arg(1.0, "eps: the ratio is clipped to 1 +- clip_ratio; 1 as in the authors' recipes", gt=0)


class Algorithm(ForwardAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config
    references = ("policy",)

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [B, W] per sample and noise level, before its weight, and metrics."""
        target = batch.corrupted.target(batch.trace.clean)
        velocity = policy.predict(batch.trace, batch.corrupted)
        error = mean_square(velocity - target)
        old_error = mean_square(batch.reference_outputs["policy"] - target)
        loss, stats = clipped_surrogate(-error, -old_error, batch.advantage, clip_ratio=self.config.clip_ratio)
        return self.penalise(loss, velocity, batch, stats | {"flow_loss": error})
