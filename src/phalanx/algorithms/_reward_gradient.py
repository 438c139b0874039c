"""The base class of algorithms that differentiate the reward through its model, the VAE and the last sampling steps."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from phalanx.algorithms._bases import GroupAlgorithm
from phalanx.algorithms._forward import mean_square
from phalanx.config.fields import arg
from phalanx.config.run import AlgorithmConfig
from phalanx.functional.flow import Denoiser, FlowBatch, FlowTrace, States
from phalanx.functional.sde import sde_step
from phalanx.types import Metrics, Policy, Samples


@dataclass
class RewardGradientConfig(AlgorithmConfig):
    """The configuration shared by algorithms that differentiate the reward."""

    DEFAULTS: ClassVar[dict[str, Any]] = {"rollout.noise_level": 0.0}  # the steps of the ODE are differentiated

    kl_loss_coef: float = arg(
        0.0,
        "lambda: weight of mean (v - v_ref)^2 at the first state that is differentiated; 0 runs no reference at all",
        ge=0,
    )


class RewardGradientAlgorithm(GroupAlgorithm, ABC):
    """loss = f(r(D(x_0))) + lambda mean (v - v_ref)^2, with x_0 computed from states kept by the rollout, D the VAE's
    decoder and r the weighted reward. All samples count; the rewards of the rollout are only logged.
    """

    config: RewardGradientConfig
    trains_all = True

    @abstractmethod
    def corrupt(self, policy: Policy, samples: Samples, seeds: Sequence[int]) -> States:
        """The states from which the images are recomputed, a function of one seed per sample."""

    @abstractmethod
    def shaped(self, reward: Tensor) -> Tensor:
        """The loss [B, V] of rewards [B, V]."""

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] zeros: the loss uses no advantages."""
        return torch.zeros(len(reward))

    def reference_output(self, policy: Policy, batch: FlowBatch) -> Tensor:
        """The velocities [B, V, ...] of other weights at the states."""
        return _state_velocities(cast(Denoiser, policy), batch.trace, batch.corrupted)

    def clean(self, policy: Denoiser, trace: FlowTrace, states: States, velocity: Tensor) -> Tensor:
        """The final latents [B, V, ...] predicted at the states from the velocities there: x_0 = x - sigma v."""
        sigma = trace.sigmas[states.step]
        return states.latents - sigma.view(*sigma.shape, *[1] * (velocity.dim() - 2)) * velocity

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [B, W] per sample, before its weight, and metrics."""
        flow, states, sampler = cast(Denoiser, policy), batch.corrupted, batch.trace.sampler
        assert batch.score is not None, "the loop provides it to algorithms with last_steps"
        velocity = _state_velocities(flow, batch.trace, states)
        clean = self.clean(flow, batch.trace, states, velocity)
        images = flow.model.decode(clean.flatten(0, 1), sampler.height, sampler.width)
        reward = batch.score(images).view(states.step.shape)
        shape = states.mask.shape  # that of the loss, which has one reward for all of several steps
        loss = self.shaped(reward)
        stats: Metrics = {"reward_mean": reward.expand(shape)}
        if "reference" in batch.reference_outputs:
            distance = mean_square(velocity - batch.reference_outputs["reference"])
            loss, stats["kl_ref"] = loss + self.config.kl_loss_coef * distance, distance.expand(shape)
        return loss.expand(shape), stats


def euler_steps(policy: Denoiser, trace: FlowTrace, x: Tensor, velocity: Tensor) -> Tensor:
    """The final latents [B, ...] after all steps of a trace, given its first states x [B, ...] and their velocities."""
    count = len(trace.timesteps)
    for i in range(count):
        if i > 0:
            timesteps = trace.timesteps[i].expand(len(x))
            velocity = policy.velocity(x, timesteps, trace.embeds, trace.prompt_index, trace.sampler)
        # the same step as in the rollout
        x = sde_step(
            x,
            velocity,
            trace.sigmas[i],
            trace.sigmas[i + 1],
            noise_level=0.0,
            sde_type=trace.sampler.sde_type,
            sigma_max=trace.sigma_max,
        ).prev_sample
    return x


def _state_velocities(policy: Denoiser, trace: FlowTrace, states: States) -> Tensor:
    """The velocities [B, V, ...] at the states, in one forward pass of B V rows."""
    rows = trace.prompt_index.repeat_interleave(states.step.shape[1])
    timesteps = trace.timesteps[states.step].flatten()
    x = states.latents
    return policy.velocity(x.flatten(0, 1), timesteps, trace.embeds, rows, trace.sampler).view_as(x)
