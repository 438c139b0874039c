"""ReFL: reward feedback learning by the reward's gradient at a late denoising step (https://arxiv.org/abs/2304.05977).

    L = mean over samples of  lambda_r max(m - r(D(x_0)), 0),   x_0 = x_t - sigma_t v(x_t)

with r the weighted reward, D the VAE's decoder, and x_t the state before one of the last `last_steps` denoising steps,
drawn at random for each sample. The rollout reaches x_t without a gradient, and x_0 is the image that the model
predicts from x_t. A penalty lambda mean (v - v_ref)^2 at x_t can be added.

Deviations from the paper:
1. The paper adds a loss on data against over-optimisation, for which lambda serves here.
2. The rollout completes each image, so that its reward is known; x_t is an intermediate state.
3. All updates of a training step use the x_t sampled with the weights before the first update.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.algorithms._reward_gradient import RewardGradientAlgorithm, RewardGradientConfig
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowTrace, States
from phalanx.types import Policy, Samples


@dataclass
class Config(RewardGradientConfig):
    """The configuration of `algorithm.name=refl`."""

    last_steps: int = arg(
        3, "number of last denoising steps, one of which is trained per sample; 10 of 40 in the paper", ge=1
    )
    margin: float = arg(2.0, "m: rewards above it have no gradient; 2 in the authors' code, of ImageReward")
    reward_coef: float = arg(1e-3, "lambda_r: factor of the reward loss", gt=0)


class Algorithm(RewardGradientAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config
    levels = 1

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.last_steps = config.last_steps

    def corrupt(self, policy: Policy, samples: Samples, seeds: Sequence[int]) -> States:
        """A late state x_t [B, 1, ...] of each sample."""
        trace: FlowTrace = samples.trace
        drawn = [random.Random(seed).randrange(self.last_steps) for seed in seeds]
        step = torch.tensor(drawn, device=trace.latents.device)
        latents = trace.latents[torch.arange(len(step), device=step.device), step]
        return States(latents[:, None], step[:, None], torch.ones_like(step[:, None], dtype=torch.bool))

    def shaped(self, reward: Tensor) -> Tensor:
        """The loss [B, 1] of rewards [B, 1]."""
        return self.config.reward_coef * torch.relu(self.config.margin - reward)
