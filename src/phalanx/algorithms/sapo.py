"""SAPO: soft adaptive policy optimisation (https://arxiv.org/abs/2511.20347).

    L = sum over tokens of  -w A 4 / tau sigmoid(tau (rho - 1))

with rho the likelihood ratio of a token, A the group-relative advantage of its response, w the token's weight by
actor.loss_agg_mode (by default that of the paper, with equal weights of responses), and tau a temperature: tau_pos for
A > 0, else tau_neg. At rho = 1 the gradient is that of -A rho, and it fades out as the ratio departs from 1, whereas a
clip would cut it off.

Deviation from the paper: samples of a group whose rewards are all equal have weight 0 and do not count in the
denominator.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phalanx.algorithms._bases import TokenAlgorithm, TokenConfig
from phalanx.config.fields import arg
from phalanx.functional.losses import gated_tokens
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch, Metrics


@dataclass
class Config(TokenConfig):
    """The configuration of `algorithm.name=sapo`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"actor.loss_agg_mode": "seq-mean-token-mean"}

    tau_pos: float = arg(1.0, "temperature of the gate for positive advantages: larger ones close sooner", gt=0)
    tau_neg: float = arg(1.05, "temperature of the gate for all others", gt=0)


class Algorithm(TokenAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The gated surrogate [B, A], and its metrics."""
        c = self.config
        log_ratio = (replay.log_prob - batch.log_prob) * batch.mask
        return gated_tokens(log_ratio, batch.advantage, tau_pos=c.tau_pos, tau_neg=c.tau_neg)
