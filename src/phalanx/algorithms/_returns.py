"""The base class of algorithms with an advantage per token: a reward at each token, and GRPO's surrogate."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from phalanx.algorithms import grpo
from phalanx.algorithms._bases import OF_ADVANTAGES
from phalanx.config.fields import arg
from phalanx.functional.losses import KL_TYPES, kl_estimate
from phalanx.functional.returns import moments, placed
from phalanx.types import Credit, Scored


@dataclass
class ReturnsConfig(grpo.Config):
    """The configuration shared by algorithms with an advantage per token."""

    unused: ClassVar[tuple[str, ...]] = (*OF_ADVANTAGES, "importance")

    gamma: float = arg(1.0, "discount of later rewards, for each token", ge=0, le=1)
    kl_reward_coef: float = arg(
        0.0, "weight of the KL to the reference that is subtracted from each token's reward; 0: none", ge=0
    )
    kl_reward_type: str = arg("k1", "estimate of that KL: k1, k2 or k3", choices=KL_TYPES)


class ReturnsAlgorithm(grpo.Algorithm, ABC):
    """Assigns the reward r of a sample to its last token, except for the parts e_t that single turns of a conversation
    have earned, each at the last token of its turn; and subtracts a KL penalty at each token:

    r_t = e_t + (r - sum over t of e_t) [t is the last token] - kl_reward_coef KL_t
    """

    config: ReturnsConfig
    per_action = True
    trains_all = True

    def __init__(self, config: ReturnsConfig) -> None:
        super().__init__(config)
        if config.kl_reward_coef > 0:
            self.references = ("reference",)

    @abstractmethod
    def token_credit(self, reward: Tensor, scored: Scored, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Advantages and returns [B, A] from rewards [B, A]."""

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] the rewards themselves."""
        return reward

    def credit(self, scored: Scored, total: Callable[[Tensor], Tensor]) -> Credit:
        """The advantages and returns of tokens from their rewards r_t."""
        reward, metrics = placed(scored.advantage, scored.action_reward, scored.mask), {}
        if self.config.kl_reward_coef > 0:
            kl = kl_estimate(scored.log_prob, scored.reference_outputs["reference"], self.config.kl_reward_type)
            reward = reward - self.config.kl_reward_coef * kl
            metrics["reward/kl_mean"], _ = moments(kl, scored.mask, total)
        advantage, returns = self.token_credit(reward, scored, total)
        return Credit(advantage, returns, metrics)
