"""RLOO: REINFORCE with a leave-one-out baseline (https://arxiv.org/abs/2402.14740).

    L = sum over tokens of  w max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high)),
    A_i = r_i - mean of the other rewards of the prompt

The paper uses REINFORCE on whole responses, which is actor.loss_agg_mode=seq-mean-token-sum, the default here.

Deviations from the paper:
1. Later updates of a step use grpo's clipped ratio per token; in the first update the ratio is 1, and the gradient is
   REINFORCE's.
2. The KL to the reference, if any, is in the loss and not in the reward.
3. Samples of a group whose rewards are all equal have weight 0 and do not count in the denominator.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from phalanx.algorithms import grpo
from phalanx.functional.advantage import leave_one_out


@dataclass
class Config(grpo.Config):
    """The configuration of `algorithm.name=rloo`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"actor.loss_agg_mode": "seq-mean-token-sum"}
    unused: ClassVar[tuple[str, ...]] = ("adv_clip_max", "global_std", "norm_adv_by_std_in_grpo")


class Algorithm(grpo.Algorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] rewards minus the mean of the other rewards of the group."""
        return leave_one_out(reward, group_id)
