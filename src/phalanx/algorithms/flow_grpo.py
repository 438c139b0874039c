"""Flow-GRPO: group-relative policy optimisation of flow-matching models (https://arxiv.org/abs/2505.05470).

    L = mean over samples and trained steps of  max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + beta KL(pi, pi_ref)

with rho the ratio of transition probabilities, A the group-relative advantage, and KL that of two Gaussian transitions.

Deviations from the paper:
1. The KL divides by the true variance of the transition; `kl_convention: flow_grpo` leaves the time step out of it, as
   the authors' code does.
2. Samples of a group whose rewards are all equal have weight 0 and do not count in the mean's denominator.
3. With rollout.sde_window_size only a window of steps is stochastic and trained (Flow-GRPO-Fast).
"""

from dataclasses import dataclass

from torch import Tensor

from phalanx.algorithms._bases import TransitionAlgorithm, TransitionConfig
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowBatch, FlowReplay
from phalanx.functional.losses import clipped_ratio
from phalanx.types import Metrics


@dataclass
class Config(TransitionConfig):
    """The configuration of `algorithm.name=flow_grpo`."""

    clip_ratio: float = arg(1e-4, "eps: the ratio is clipped to 1 +- clip_ratio", gt=0)


class Algorithm(TransitionAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.clip_range = config.clip_ratio

    def surrogate(self, replay: FlowReplay, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The clipped surrogate [B, W], and its metrics."""
        log_ratio = self.sequence_mean(replay.log_prob - batch.log_prob)
        return clipped_ratio(log_ratio, batch.advantage, clip_ratio=self.config.clip_ratio)
