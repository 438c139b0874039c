"""REINFORCE++: returns of tokens, normalised over the whole batch, without a critic (https://arxiv.org/abs/2501.03262).

    R_t = sum_{k >= 0} gamma^k r_{t+k},    A = (R - mean(R)) / std(R) over the tokens of all ranks

    L = sum over tokens of  w max(-A_t rho, -A_t clip(rho, 1 - eps_low, 1 + eps_high))

with rho the likelihood ratio of a token, and r_t the sample's reward at its last token, less a KL to the reference;
what single turns of a conversation earned is at their last tokens.

`group_baseline` is REINFORCE++-baseline: the mean reward of a prompt's samples is taken off each of them first.

Deviations from the paper:
1. For negative advantages rho is bounded by clip_ratio_c, as in verl (dual clip).
2. In either form the KL may be in the reward (kl_reward_coef) or in the loss (kl_loss_coef); the paper has it in the
   reward, and with a baseline in the loss (k2).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.algorithms._returns import ReturnsAlgorithm, ReturnsConfig
from phalanx.config.load import arg
from phalanx.functional.advantage import group_advantage
from phalanx.functional.returns import gae, whitened
from phalanx.types import Scored


@dataclass
class Config(ReturnsConfig):
    """Keys of `algorithm` where its name is reinforce_plus_plus."""

    group_baseline: bool = arg(False, "first take the mean reward of its prompt's samples off each reward")

    @property
    def needs_groups(self) -> bool:
        """Only a baseline of each prompt's samples does."""
        return self.group_baseline


class Algorithm(ReturnsAlgorithm):
    """The algorithm, pure: see phalanx.types.Algorithm."""

    config: Config

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] the rewards, less their group's mean with `group_baseline`."""
        return group_advantage(reward, group_id, normalize=False) if self.config.group_baseline else reward

    def token_credit(self, reward: Tensor, scored: Scored, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Whitened returns, and the returns [B, A] of rewards [B, A]."""
        values = torch.zeros_like(scored.log_prob)
        returns, _ = gae(reward, values, scored.mask, gamma=self.config.gamma, lam=1.0)
        return whitened(returns, scored.mask, total), returns
