"""Flow-DPPO: divergence proximal policy optimisation of flow-matching models (arXiv 2606.11025).

    L = mean over samples and trained steps of  -A rho M + beta KL(pi, pi_ref)
    M = 0 if D >= threshold, and rho > 1 with A > 0 or rho < 1 with A < 0;  else 1
    D = mean(mu - mu_old)^2 / 2 std^2

The divergence D of two Gaussian transitions is exact, whereas PPO's clip depends on the ratio of one noisy sample. A
step that leads back towards the old policy is never dropped.

Deviations from the paper:
1. D is the mean over a latent's dims, like all log-probabilities here, and so is the threshold.
2. Advantages are clamped to +- algorithm.adv_clip_max, as in all algorithms that divide by a std; the authors' are not.
3. As in flow_grpo, groups of equal rewards have weight 0, and only the steps of a window are trained.
"""

from dataclasses import dataclass

from torch import Tensor

from phalanx.algorithms._bases import TransitionAlgorithm, TransitionConfig, divergence
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowBatch, FlowReplay
from phalanx.functional.losses import masked_ratio
from phalanx.types import Metrics


@dataclass
class Config(TransitionConfig):
    """The configuration of `algorithm.name=flow_dppo`."""

    threshold: float = arg(1e-5, "divergence from the old policy above which no update leads further away", gt=0)


class Algorithm(TransitionAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.clip_range = config.threshold  # a divergence, which has the magnitude of the ratio's error

    def surrogate(self, replay: FlowReplay, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The masked surrogate [B, W], and its metrics."""
        moved = divergence(replay.mean.detach(), batch.trace.means, replay.std)
        return masked_ratio(
            self.sequence_mean(replay.log_prob - batch.log_prob),
            self.sequence_mean(moved),
            batch.advantage,
            threshold=self.config.threshold,
        )
