"""PPO with a critic: proximal policy optimisation of language models (https://arxiv.org/abs/1707.06347).

    delta_t = r_t + gamma V_{t+1} - V_t,    A_t = sum_{k >= 0} (gamma lam)^k delta_{t+k},    R_t = A_t + V_t

    L  = sum over tokens of  w max(-A_t rho, -A_t clip(rho, 1 - eps_low, 1 + eps_high))
    Lv = sum over tokens of  w max((V_t - R_t)^2, (clip(V_t, V_old +- c) - R_t)^2) / 2

with w the token's weight by actor.loss_agg_mode, rho its likelihood ratio, A whitened over the tokens of all ranks
before L, V the critic's value of the text before a token (section `critic`), and r_t the reward at a token: the
sample's reward at its last token, rewards of single turns at their last tokens, minus a KL to the reference.

Deviations from the paper:
1. A response is an episode for generalised advantage estimation (arXiv 1506.02438): V is 0 after its last token.
2. Policy and critic are two models with separate optimizers, as in verl.
3. For negative advantages rho is bounded by clip_ratio_c, as in verl (dual clip).
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from phalanx.algorithms._returns import ReturnsAlgorithm, ReturnsConfig
from phalanx.config.fields import arg
from phalanx.functional.returns import gae, whitened
from phalanx.types import Scored


@dataclass
class Config(ReturnsConfig):
    """The configuration of `algorithm.name=ppo`."""

    lam: float = arg(1.0, "lambda of the generalised advantage estimate; 1: returns minus values", ge=0, le=1)

    @property
    def needs_groups(self) -> bool:
        """False: the baseline is the critic, not the prompt's other samples."""
        return False

    @property
    def needs_critic(self) -> bool:
        """True: a critic estimates the return of each token."""
        return True


class Algorithm(ReturnsAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def token_credit(self, reward: Tensor, scored: Scored, total: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Whitened generalised advantages, and returns, [B, A] from rewards [B, A]."""
        assert scored.values is not None
        advantage, returns = gae(reward, scored.values, scored.mask, gamma=self.config.gamma, lam=self.config.lam)
        return whitened(advantage, scored.mask, total), returns
