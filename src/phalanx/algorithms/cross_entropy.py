"""Supervised fine-tuning of language models: maximum likelihood of given responses.

    L = sum over tokens of the responses of  -w log pi

with w the token's weight by actor.loss_agg_mode: with token-mean the mean over all tokens of an update, on all ranks.
The responses are those of the data with rollout.engine=dataset; with other engines they are the policy's own.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phalanx.algorithms._bases import OF_ADVANTAGES, TokenAlgorithm, TokenConfig
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import Batch, Metrics


@dataclass
class Config(TokenConfig):
    """The configuration of `algorithm.name=cross_entropy`."""

    unused: ClassVar[tuple[str, ...]] = (*OF_ADVANTAGES, "early_stop_imp_ratio")

    @property
    def needs_groups(self) -> bool:
        """Samples are not compared."""
        return False


class Algorithm(TokenAlgorithm):
    """The learning rule: see phalanx.types.Algorithm. All samples count, whatever their rewards."""

    config: Config
    needs_reward = False
    trains_all = True

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] zeros: rewards are only reported."""
        return torch.zeros(len(reward))

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The negative log-likelihood [B, A]."""
        loss = -replay.log_prob
        return loss, {"nll": loss}
