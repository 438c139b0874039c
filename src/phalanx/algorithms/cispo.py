"""CISPO: clipped importance weights of tokens (MiniMax-M1, https://arxiv.org/abs/2506.13585).

    L = sum over tokens of  -w A sg[clip(rho, 1 - eps_low, 1 + eps_high)] log pi

with rho the likelihood ratio of a token, A the group-relative advantage of its response, sg the stop-gradient operator,
and w the token's weight by actor.loss_agg_mode. The importance weight is clipped instead of the update, so every token
has a gradient, however far its ratio is from 1.

Deviation from the paper: samples of a group whose rewards are all equal have weight 0 and do not count in the
denominator.
"""

from dataclasses import dataclass
from typing import Optional

from torch import Tensor

from phalanx.algorithms._bases import TokenAlgorithm, TokenConfig
from phalanx.config.fields import arg
from phalanx.functional.losses import weighted_tokens
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch, Metrics


@dataclass
class Config(TokenConfig):
    """The configuration of `algorithm.name=cispo`."""

    clip_ratio_low: Optional[float] = arg(
        None, "eps below 1: the importance weight is at least 1 - this; null: no bound, as in the paper", gt=0, le=1
    )
    clip_ratio_high: float = arg(
        0.28, "eps above 1: the importance weight is at most 1 + this; the paper does not state its value", gt=0
    )


class Algorithm(TokenAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        low, high = config.clip_ratio_low, config.clip_ratio_high
        self.clip_range = high if low is None else min(low, high)

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The weighted log-likelihood [B, A], and its metrics."""
        c = self.config
        log_ratio = (replay.log_prob - batch.log_prob) * batch.mask
        return weighted_tokens(
            replay.log_prob, log_ratio, batch.advantage, low=c.clip_ratio_low, high=c.clip_ratio_high
        )
