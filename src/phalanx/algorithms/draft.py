"""DRaFT-K and DRaFT-LV: the reward's gradient through the last K steps of the sampler (https://arxiv.org/abs/2309.17400).

    DRaFT-K:   L = mean over samples of  -r(D(x_0)),   x_0 = K Euler steps of the policy from stop(x_K)
    DRaFT-LV:  L = mean over samples and n draws of  -r(D(x_0)),   x_0 = x_1 - sigma_1 v(x_1),
               x_1 = (1 - sigma_1) stop(x_0) + sigma_1 noise

with r the weighted reward, D the VAE's decoder, stop the stop-gradient operator, and x_K the state before the last K
denoising steps, which the rollout reaches without a gradient. A penalty lambda mean (v - v_ref)^2 at x_K or x_1 can be
added.

Deviations from the paper:
1. All updates of a training step start from the x_K sampled with the weights before the first update.
2. Images are sampled with Euler steps of the flow's ODE; the paper uses DDIM.
3. Full fine-tuning is possible; the paper trains a LoRA, and lowers its scale against over-optimisation, for which
   lambda serves here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.algorithms._reward_gradient import RewardGradientAlgorithm, RewardGradientConfig, euler_steps
from phalanx.config.choices import ONE_STEP
from phalanx.config.fields import arg
from phalanx.functional.flow import Denoiser, FlowTrace, States
from phalanx.types import Policy, Samples


@dataclass
class Config(RewardGradientConfig):
    """The configuration of `algorithm.name=draft`."""

    last_steps: int = arg(1, "K: number of last denoising steps through which the reward is differentiated", ge=1)
    noise_draws: int = arg(
        0,
        "n: the last step is taken from n fresh draws of noise for each final latent, not from the sampled state "
        "(DRaFT-LV; 2 in the paper); 0: DRaFT-K",
        only=(ONE_STEP,),
        ge=0,
    )


class Algorithm(RewardGradientAlgorithm):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.last_steps = config.last_steps
        self.levels = config.noise_draws or config.last_steps

    def corrupt(self, policy: Policy, samples: Samples, seeds: Sequence[int]) -> States:
        """The sampled states x_K [B, 1, ...], or draws of x_1 [B, n, ...]."""
        trace: FlowTrace = samples.trace
        draws, latents = self.config.noise_draws, trace.latents[:, :1]
        if draws:
            noise = policy.corrupt(samples, seeds, levels=draws, distribution="uniform").noise
            latents = (1 - trace.sigmas[0]) * trace.clean[:, None] + trace.sigmas[0] * noise
        step = torch.zeros(latents.shape[:2], dtype=torch.long, device=latents.device)
        return States(latents, step, step.new_ones(len(step), self.levels or 1).bool())

    def clean(self, policy: Denoiser, trace: FlowTrace, states: States, velocity: Tensor) -> Tensor:
        """The final latents [B, V, ...] after the K steps from the states."""
        if self.config.noise_draws:
            return super().clean(policy, trace, states, velocity)
        return euler_steps(policy, trace, states.latents[:, 0], velocity[:, 0])[:, None]

    def shaped(self, reward: Tensor) -> Tensor:
        """The loss [B, V] of rewards [B, V]."""
        return -reward
