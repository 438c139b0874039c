"""Flow-GRPO: group-relative policy optimisation of flow-matching models (https://arxiv.org/abs/2505.05470).

    L = mean over samples and trained steps of  max(-A rho, -A clip(rho, 1 - eps, 1 + eps)) + beta KL(pi, pi_ref)

with rho the ratio of transition probabilities, A the group-relative advantage, and KL that of two Gaussian transitions.

Deviations from the paper:
1. The KL divides by the true variance of the transition; `kl_convention: flow_grpo` divides by the SDE's scale without
   its time step, as the authors' code does.
2. Samples of a group whose rewards are all equal have weight 0 and leave the mean's denominator.
3. Only a window of steps is stochastic and trained (Flow-GRPO-Fast), where rollout.sde_window_size says so.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.config.load import arg
from phalanx.config.schema import AlgorithmConfig
from phalanx.functional.advantage import group_advantage
from phalanx.functional.losses import clipped_surrogate
from phalanx.functional.sde import gaussian_kl
from phalanx.types import Batch, Policy


@dataclass
class Config(AlgorithmConfig):
    """Keys of `algorithm` where its name is flow_grpo."""

    clip_ratio: float = arg(1e-4, "eps: the ratio is clipped to 1 +- clip_ratio", gt=0)
    adv_clip_max: float = arg(5.0, "advantages are clamped to +- this", gt=0)
    kl_loss_coef: float = arg(0.0, "beta: weight of the KL to the reference; 0 runs no reference at all", ge=0)
    kl_convention: str = arg(
        "exact", "exact Gaussian KL, or divided as flow_grpo's code does", choices=("exact", "flow_grpo")
    )
    global_std: bool = arg(False, "divide advantages by the std of all rewards, not of the group's")
    norm_adv_by_std_in_grpo: bool = arg(True, "divide advantages by a std at all; false is Dr.GRPO")


class Rule:
    """The algorithm, pure: see phalanx.types.Algorithm."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.needs_reference = config.kl_loss_coef > 0

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] advantages of the world's N samples."""
        c = self.config
        return group_advantage(reward, group_id, global_std=c.global_std, normalize=c.norm_adv_by_std_in_grpo)

    def loss(self, policy: Policy, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [B, W] of each sample and trained step, before its weight, and detached scalars."""
        c = self.config
        replay = policy.replay(batch.trace)
        loss, stats = clipped_surrogate(
            replay.log_prob, batch.log_prob, batch.advantage, clip_ratio=c.clip_ratio, adv_clip_max=c.adv_clip_max
        )
        if self.needs_reference:
            assert batch.ref_mean is not None
            std = replay.std
            if c.kl_convention == "flow_grpo" and batch.trace.sampler.sde_type == "sde":
                sigmas = batch.trace.sigmas
                std = std / torch.sqrt(sigmas[:-1] - sigmas[1:])
            kl = gaussian_kl(replay.mean.flatten(0, 1), batch.ref_mean.flatten(0, 1), std.repeat(len(loss)))
            loss = loss + c.kl_loss_coef * kl.view_as(loss)
            stats["kl_ref"] = kl.detach().mean()
        return loss, stats
