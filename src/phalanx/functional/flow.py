"""Values of flow matching: samplers, the steps that samples took, and fresh noise for them.

Shapes: B samples of this rank, W trained denoising steps or noise levels, P prompts of this rank;
`...` is a latent's own shape.
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
    """Settings by which images, or videos of `num_frames`, are denoised.

    Sizes are in pixels; `guidance` is a scale (1: off), `noise_level` the eta of stochastic steps.
    `embedded_guidance` is the scale that a guidance-distilled model takes as an input; None for
    other models. `solver` takes the steps behind the stochastic ones, or all where there are none;
    `compression` is the share of the steps behind a window that is taken. `guidance_2` is the scale of steps that a
    model's second transformer takes; None: `guidance`.
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
        """True where a second branch is computed, for classifier-free guidance."""
        return self.guidance > 1


@dataclass(frozen=True)
class FlowReplay(Replay):
    """The policy's answer to given transitions, float32.

    log_prob [B, W], mean [B, W, ...], std [W], and the velocities [B, W, ...] that the means follow from.
    """

    mean: Tensor
    std: Tensor
    velocity: Tensor


@dataclass(frozen=True)
class FlowTrace:
    """The values that a replay needs: S consecutive steps are stochastic, W of them are trained.

    latents [B, S + 1, ...] float32: the samples before each stochastic step and after the last; sigmas [S + 1] and
    timesteps [S]: noise levels in 0..1 and the scheduler's timesteps; `sigma_max` the schedule's second entry;
    `typical_std` the mean std of the transitions of all steps that a window may hold, 0 where nothing is stochastic;
    `trained` [W] ascending: which of the S steps are trained. `embeds` text embeddings by name, each [P, ...] or under
    guidance [2 P, ...]: the prompts, then their negatives; `prompt_index` [B] into the prompts. `means` [B, W, ...]
    float32 are the means of the trained transitions under the weights that sampled, and `clean` [B, ...] float32 the
    final latents. `evaluations`: velocities that each sample took.
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
        """[W] sigma_next - sigma < 0 of the trained steps."""
        return (self.sigmas[1:] - self.sigmas[:-1])[self.trained]

    def select(self, rows: Tensor) -> "FlowTrace":
        """The samples in `rows` [b]; embeddings stay shared."""
        return replace(
            self,
            latents=self.latents[rows],
            means=self.means[rows],
            clean=self.clean[rows],
            prompt_index=self.prompt_index[rows],
        )

    @classmethod
    def joined(cls, parts: Sequence["FlowTrace"]) -> "FlowTrace":
        """See phalanx.types.Trace. Each part has separate prompts and embeddings."""
        branches = 2 if parts[0].sampler.guided else 1
        embeds = {}
        for name in parts[0].embeds:
            some = [part.embeds[name].unflatten(0, (branches, -1)) for part in parts]
            embeds[name] = torch.cat(some, 1).flatten(0, 1)
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
        """The trace with the means [b, W, ...] of `replays`, each of the samples whose rows are in its part [b]."""
        return replace(self, means=in_order([replay.mean for replay in replays], parts))


@dataclass(frozen=True)
class Noised:
    """Fresh noise for final latents, to train at: x_t = (1 - t) clean + t noise.

    noise [B, W, ...] float32; levels [B, W] in 0..1, the t of each.
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
        """x_t [B, W, ...] of clean latents [B, ...]."""
        t = self.t
        return (1 - t) * clean[:, None] + t * self.noise

    def target(self, clean: Tensor) -> Tensor:
        """The velocity [B, W, ...] that leads from clean latents [B, ...] to the noise."""
        return self.noise - clean[:, None]

    @property
    def t(self) -> Tensor:
        """The levels, to broadcast over latents [B, W, ...]."""
        return self.levels.view(*self.levels.shape, *[1] * (self.noise.dim() - 2))


@dataclass(frozen=True)
class States:
    """States of the last denoising steps, from which images are computed anew: V for each sample.

    latents [B, V, ...] float32; step [B, V], the number of the step that each is before, among those of the trace; mask
    [B, W] bool: see phalanx.types.Corrupted.
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
        """Guided velocity [N, ...] float32."""


FlowBatch = Batch[FlowTrace]
