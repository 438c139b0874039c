"""RAFT: supervised fine-tuning on the policy's own best responses (https://arxiv.org/abs/2304.06767).

    L = sum over tokens of the best responses of each prompt of  -w log pi

with w the token's weight by actor.loss_agg_mode: rejection sampling, as a baseline.

Deviation from the paper: prompts whose responses all have equal rewards are left out, since none of them is the best.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phalanx.algorithms._bases import OF_ADVANTAGES, TokenAlgorithm, TokenConfig
from phalanx.config.fields import arg
from phalanx.functional.advantage import best_of_group
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch, Metrics


@dataclass
class Config(TokenConfig):
    """The configuration of `algorithm.name=raft`."""

    unused: ClassVar[tuple[str, ...]] = (*OF_ADVANTAGES, "early_stop_imp_ratio")

    best: int = arg(1, "number of responses per prompt to train on, those with the highest rewards", ge=1)


class Algorithm(TokenAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def sample_mask(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] bool: the best of each group whose rewards differ; among equal rewards, the first ones."""
        return best_of_group(reward, group_id, self.config.best)

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The negative log-likelihood [B, A]."""
        loss = -replay.log_prob
        return loss, {"nll": loss}
