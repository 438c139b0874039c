"""RLOO: REINFORCE with a leave-one-out baseline (https://arxiv.org/abs/2402.14740).

    L = sum over tokens of  w max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high)),
    A_i = r_i - mean of the other rewards of the prompt

The paper's is REINFORCE on whole responses, which is actor.loss_agg_mode=seq-mean-token-sum, the default here.

Deviations from the paper:
1. Later updates of a step have grpo's clipped ratio of each token; in the first one that is 1, and its gradient
   REINFORCE's.
2. The KL to the reference, if there is one, is in the loss and not in the reward.
3. Samples of a group whose rewards are all equal have weight 0 and leave the denominator.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phalanx.algorithms import grpo
from phalanx.functional.advantage import leave_one_out


@dataclass
class Config(grpo.Config):
    """Keys of `algorithm` where its name is rloo."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"actor.loss_agg_mode": "seq-mean-token-sum"}
    unused: ClassVar[tuple[str, ...]] = ("adv_clip_max", "global_std", "norm_adv_by_std_in_grpo")


class Algorithm(grpo.Algorithm):
    """The algorithm, pure: see phalanx.types.Algorithm."""

    config: Config

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] rewards less the mean of the others of their group."""
        return leave_one_out(reward, group_id)
