"""REINFORCE++: token returns, normalised over the whole batch, without a critic (https://arxiv.org/abs/2501.03262).

    R_t = sum_{k >= 0} gamma^k r_{t+k},    A = (R - mean(R)) / std(R) over the tokens of all ranks

    L = sum over tokens of  w max(-A_t rho, -A_t clip(rho, 1 - eps_low, 1 + eps_high))

with w the token's weight by actor.loss_agg_mode, rho its likelihood ratio, and r_t the reward at a token: the sample's
reward at its last token, rewards of single turns at their last tokens, minus a KL to the reference.

`group_baseline` is REINFORCE++-baseline, which first subtracts the mean reward of a prompt's samples from each of them.

Deviations from the paper:
1. For negative advantages rho is bounded by clip_ratio_c, as in verl (dual clip).
2. With or without the baseline, the KL can be in the reward (kl_reward_coef) or in the loss (kl_loss_coef); the paper
   puts it in the reward, and with the baseline in the loss (k2).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.algorithms._returns import ReturnsAlgorithm, ReturnsConfig
from phalanx.config.fields import arg
from phalanx.functional.advantage import group_advantage
from phalanx.functional.returns import gae, whitened
from phalanx.types import Scored


@dataclass
class Config(ReturnsConfig):
    """The configuration of `algorithm.name=reinforce_plus_plus`."""

    group_baseline: bool = arg(False, "first subtract the mean reward of the prompt's samples from each reward")

    @property
    def needs_groups(self) -> bool:
        """True for a baseline from the prompt's other samples."""
        return self.group_baseline


class Algorithm(ReturnsAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] the rewards; with `group_baseline`, minus their group's mean."""
        return group_advantage(reward, group_id, normalize=False) if self.config.group_baseline else reward

    def token_credit(self, reward: Tensor, scored: Scored, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Whitened returns as advantages, and returns, [B, A] from rewards [B, A]."""
        values = torch.zeros_like(scored.log_prob)
        returns, _ = gae(reward, values, scored.mask, gamma=self.config.gamma, lam=1.0)
        return whitened(returns, scored.mask, total), returns
