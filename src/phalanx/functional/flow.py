"""Data types of flow matching: sampler settings, traces of sampled trajectories, and fresh noise.

Shapes: B samples of this rank, W trained denoising steps or noise levels, P prompts of this rank; `...` is the shape of
a latent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.functional.token_budget import in_order
from phalanx.types import Batch, Replay


@dataclass(frozen=True)
class Sampler:
    """Settings for denoising images, or videos of `num_frames` frames.

    height and width: in pixels. guidance: classifier-free guidance scale, 1 is off. noise_level: eta of stochastic
    steps. embedded_guidance: the scale that a guidance-distilled model takes as an input, None for other models.
    solver: takes the steps after the stochastic ones, or all steps if none are stochastic. compression: fraction of the
    steps after a window that is kept. guidance_2: guidance scale of the steps of a model's second transformer, None:
    `guidance`.
    """

    num_inference_steps: int
    height: int
    width: int
    guidance: float
    noise_level: float
    sde_type: str
    embedded_guidance: float | None = None
    solver: str = "euler"
    compression: float = 1.0
    num_frames: int = 1
    guidance_2: float | None = None

    @property
    def guided(self) -> bool:
        """Whether an unconditional branch is computed for classifier-free guidance."""
        return self.guidance > 1


@dataclass(frozen=True)
class FlowReplay(Replay):
    """The policy's view of given transitions, float32.

    log_prob: [B, W]. mean: [B, W, ...]. std: [W]. velocity: [B, W, ...], from which the means are computed.
    """

    mean: Tensor
    std: Tensor
    velocity: Tensor


@dataclass(frozen=True)
class FlowTrace:
    """The values that a replay needs: S consecutive stochastic steps, of which W are trained.

    latents: [B, S + 1, ...] float32, before each stochastic step and after the last. means: [B, W, ...] float32, means
    of the trained transitions under the weights that sampled. clean: [B, ...] float32, the final latents. sigmas:
    [S + 1], noise levels in 0..1. timesteps: [S], those of the scheduler. sigma_max: second entry of the schedule.
    typical_std: mean std of the transitions of all steps that a window may contain, 0 without stochastic steps.
    trained: [W] ascending, the indices of the trained steps among the S. embeds: text embeddings by name, [P, ...], or
    [2 P, ...] with guidance: the prompts, then their negative prompts. prompt_index: [B] into the P prompts.
    evaluations: number of velocity evaluations per sample.
    """

    sampler: Sampler

    latents: Tensor
    means: Tensor
    clean: Tensor
    sigmas: Tensor
    timesteps: Tensor
    sigma_max: float
    typical_std: float
    trained: Tensor
    embeds: dict[str, Tensor]
    prompt_index: Tensor
    evaluations: int

    @property
    def delta(self) -> Tensor:
        """[W] sigma_next - sigma (negative) of the trained steps."""
        return (self.sigmas[1:] - self.sigmas[:-1])[self.trained]

    def select(self, rows: Tensor) -> "FlowTrace":
        """The samples in `rows` [b]; the embeddings are not copied."""
        return replace(
            self,
            latents=self.latents[rows],
            means=self.means[rows],
            clean=self.clean[rows],
            prompt_index=self.prompt_index[rows],
        )

    @classmethod
    def joined(cls, parts: Sequence["FlowTrace"]) -> "FlowTrace":
        """See phalanx.types.Trace. The parts' prompts and embeddings are concatenated as well."""
        branches = 2 if parts[0].sampler.guided else 1
        embeds = {}
        for name in parts[0].embeds:
            by_branch = [part.embeds[name].unflatten(0, (branches, -1)) for part in parts]
            embeds[name] = torch.cat(by_branch, 1).flatten(0, 1)
        first, index = 0, []
        for part in parts:
            index.append(part.prompt_index + first)
            first += len(next(iter(part.embeds.values()))) // branches
        return replace(
            parts[0],
            latents=torch.cat([part.latents for part in parts]),
            means=torch.cat([part.means for part in parts]),
            clean=torch.cat([part.clean for part in parts]),
            embeds=embeds,
            prompt_index=torch.cat(index),
        )

    def rescored(self, replays: Sequence[FlowReplay], parts: Sequence[Tensor]) -> "FlowTrace":
        """The trace with the means of `replays` [b, W, ...], each for the samples in the rows `parts` [b]."""
        return replace(self, means=in_order([replay.mean for replay in replays], parts))


@dataclass(frozen=True)
class Noised:
    """Fresh noise for final latents, for training at x_t = (1 - t) clean + t noise.

    noise: [B, W, ...] float32. levels: [B, W], t in 0..1.
    """

    noise: Tensor
    levels: Tensor

    @property
    def mask(self) -> Tensor:
        """[B, W] bool: all levels are trained."""
        return torch.ones_like(self.levels, dtype=torch.bool)

    def select(self, rows: Tensor) -> "Noised":
        """The samples in `rows` [b]."""
        return Noised(self.noise[rows], self.levels[rows])

    def latents(self, clean: Tensor) -> Tensor:
        """x_t [B, W, ...] from clean latents [B, ...]."""
        t = self.t
        return (1 - t) * clean[:, None] + t * self.noise

    def target(self, clean: Tensor) -> Tensor:
        """The velocity [B, W, ...] from clean latents [B, ...] to the noise."""
        return self.noise - clean[:, None]

    @property
    def t(self) -> Tensor:
        """The levels, shaped to broadcast over latents [B, W, ...]."""
        return self.levels.view(*self.levels.shape, *[1] * (self.noise.dim() - 2))


@dataclass(frozen=True)
class States:
    """States of the last denoising steps from which images are recomputed, V per sample.

    latents: [B, V, ...] float32. step: [B, V], the index of the step that follows each state, among those of the trace.
    mask: [B, W] bool, see phalanx.types.Corrupted.
    """

    latents: Tensor
    step: Tensor
    mask: Tensor

    def select(self, rows: Tensor) -> "States":
        """The samples in `rows` [b]."""
        return States(self.latents[rows], self.step[rows], self.mask[rows])


class Denoiser(Protocol):
    """The policy of a flow-matching model, see phalanx.models.flow.policy.FlowPolicy."""

    @property
    def model(self) -> Any: ...

    def velocity(
        self, latents: Tensor, timesteps: Tensor, embeds: dict[str, Tensor], rows: Tensor, sampler: Sampler
    ) -> Tensor:
        """The guided velocity [N, ...] float32."""


FlowBatch = Batch[FlowTrace]


def noise_levels(uniform: Tensor, count: int, schedule: Tensor, *, distribution: str, shift: float) -> Tensor:
    """The levels [B, count] of B samples, from uniform random numbers.

    Args:
        uniform: [B, >= max(count, len(schedule))] random numbers in [0, 1).
        schedule: [N] noise levels of the rollout's steps, without the final 0.
        distribution: "schedule": levels of the schedule in random order, repeated only after all were used; "uniform"
            or "logit_normal" (SD3, arXiv 2403.03206, section 3.1), both shifted by s = `shift`: s t / (1 + (s - 1) t).

    Raises:
        ValueError: for an unknown distribution.
    """
    if distribution == "schedule":
        n = len(schedule)
        order = torch.argsort(uniform[:, :n], dim=1)
        return schedule[order[:, torch.arange(count) % n]]
    if distribution not in ("uniform", "logit_normal"):
        raise ValueError(f"noise_levels: distribution {distribution!r} should be schedule, uniform or logit_normal")
    t = uniform[:, :count]
    if distribution == "logit_normal":
        # inverse normal CDF; the bounds keep 0 and 1, where it is infinite, out of reach
        t = torch.sigmoid(torch.special.ndtri(t.double().clamp(2**-25, 1 - 2**-25))).float()
    return shift * t / (1 + (shift - 1) * t)
