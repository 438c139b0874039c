"""GRPO-Guard: flow-matching GRPO with regulated ratios, against over-optimisation (arXiv 2510.22319).

    L = mean over samples and trained steps of  max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) / d^2 + beta KL(pi, pi_ref)
    ln rho = (ln p - ln p_old + b) c,  b = mean(mu - mu_old)^2 / 2 c^2,  c the transition's std,  d^2 = sigma - sigma'

b removes the bias of ln p - ln p_old, whose mean is negative for samples of the old policy. The factor c makes
ln rho = mean((mu - mu_old) eps), so that one clip range fits all noise levels. 1/d^2 balances the gradients of the
steps.

Deviations from the paper:
1. c and d are those of each sample and step, not averaged over a batch.
2. As in flow_grpo, groups of equal rewards have weight 0, and only the steps of a window are trained.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phalanx.algorithms import flow_grpo
from phalanx.algorithms._bases import divergence
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowBatch, FlowReplay
from phalanx.functional.losses import clipped_ratio, guarded_log_ratio
from phalanx.types import Metrics


@dataclass
class Config(flow_grpo.Config):
    """The configuration of `algorithm.name=grpo_guard`."""

    # the bias correction assumes Gaussian log-probabilities, which cps does not use
    sde_types: ClassVar[tuple[str, ...]] = ("sde", "dance_sde")

    clip_ratio: float = arg(2e-6, "eps: the regulated ratio is clipped to 1 +- clip_ratio", gt=0)


class Algorithm(flow_grpo.Algorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def surrogate(self, replay: FlowReplay, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The clipped surrogate [B, W] of the regulated ratio, divided by the time steps, and its metrics."""
        bias = divergence(replay.mean, batch.trace.means, replay.std)
        log_ratio = guarded_log_ratio(replay.log_prob - batch.log_prob, bias, replay.std)
        loss, stats = clipped_ratio(self.sequence_mean(log_ratio), batch.advantage, clip_ratio=self.config.clip_ratio)
        return loss / -batch.trace.delta, stats | {"ratio_bias": bias}
