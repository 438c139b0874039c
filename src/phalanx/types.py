"""The values that flow through the loop, and the protocols of the parts that produce them.

Shapes: B samples of this rank, W trained denoising steps, P prompts of this rank; `...` is a latent's own shape.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class JobError(RuntimeError):
    """A failure of the running job that its message explains in one line, such as a reward that raises."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and what its reward needs.

    `group_id` numbers the prompts of one step over the world; `meta` holds `ground_truth`, `data_source`, and all
    other columns of the data file. `negative` is the negative prompt, None for the model family's default.
    """

    text: str
    group_id: int
    meta: dict[str, Any]
    negative: str | None = None


@dataclass(frozen=True)
class Sampler:
    """How images, or videos of `num_frames`, are denoised: sizes in pixels, `guidance` scale (1: off), `noise_level`
    eta of stochastic steps.

    `embedded_guidance` is the scale that a guidance-distilled model takes as an input; None for other models.
    `solver` takes the steps behind the stochastic ones, or all where there are none; `compression` is the share of the
    steps behind a window that is taken.
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

    @property
    def guided(self) -> bool:
        """Whether a second branch is computed, that of the negative prompts: classifier-free guidance."""
        return self.guidance > 1


@dataclass(frozen=True)
class FlowTrace:
    """What a replay of the trained denoising steps needs; S consecutive steps are stochastic, W of them are trained.

    latents [B, S + 1, ...] float32: the samples before each stochastic step and after the last; sigmas [S + 1] and
    timesteps [S]: noise levels in 0..1 and the scheduler's timesteps; `sigma_max` the schedule's second entry;
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
    trained: Tensor
    embeds: dict[str, Tensor]
    prompt_index: Tensor
    evaluations: int

    @property
    def delta(self) -> Tensor:
        """[W] sigma_next - sigma < 0 of the trained steps."""
        return (self.sigmas[1:] - self.sigmas[:-1])[self.trained]


@dataclass(frozen=True)
class Samples:
    """What this rank sampled: `outputs` in 0..1 on the CPU, images [B, 3, H, W] or videos [B, F, 3, H, W]; `log_prob`
    [B, W] or None.

    `index` [B] is each sample's number in the step over the world; sample i belongs to group i // n. `weight` [B, W]
    are factors of the loss where another engine drew the samples.
    """

    prompts: list[Prompt]
    outputs: Tensor
    log_prob: Tensor | None
    trace: FlowTrace
    index: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True)
class Noised:
    """Fresh noise for final latents, as forward-process algorithms train on it: x_t = (1 - t) clean + t noise.

    noise [B, W, ...] float32; levels [B, W] in 0..1, the t of each.
    """

    noise: Tensor
    levels: Tensor

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
class Batch:
    """Samples of one forward and backward pass.

    log_prob [B, W], the trained transitions' under the weights that sampled; advantage [B]. weight [U, W] is that of
    each unit (a sample, or the samples that the algorithm's `units` trains together) in each trained step: it already
    holds the world's denominator, and is 0 for units that do not count. `views` holds what the algorithm's `view` said
    of these samples under other weights, by their names. `noised` is for forward-process algorithms alone.
    """

    trace: FlowTrace
    log_prob: Tensor
    advantage: Tensor
    weight: Tensor
    views: dict[str, Tensor]
    noised: Noised | None = None


@dataclass(frozen=True)
class Replay:
    """The policy's view of given transitions, float32: log_prob [B, W], mean [B, W, ...], std [W], and the velocities
    [B, W, ...] that the means follow from.
    """

    log_prob: Tensor
    mean: Tensor
    std: Tensor
    velocity: Tensor


@dataclass(frozen=True)
class Expert:
    """A frozen model beside the policy, of its family: a diffusers folder or hub id, which the configuration's `key`
    names, and its guidance scale (None: the rollout's).
    """

    name: str
    path: str
    key: str
    guidance: float | None = None


class TextToImage(Protocol):
    """What sampling needs to know of a model; see phalanx.models.family.FlowModel."""

    pipeline_class: str
    guidance_key: str
    embedded_guidance_key: str | None
    image_column: str | None
    makes_videos: bool
    fps: int
    transformer: Any
    dtype: torch.dtype

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]: ...

    def sample_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]: ...

    def schedule(self, num_inference_steps: int, height: int, width: int) -> tuple[Tensor, Tensor]: ...

    def collate(self, embeds: list[dict[str, Tensor]], length: int, padded: bool) -> dict[str, Tensor]: ...

    def encode_images(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor: ...


class Policy(Protocol):
    """The trained model; see phalanx.models.flow.FlowPolicy."""

    @property
    def model(self) -> TextToImage: ...

    def embed(
        self, prompts: list[Prompt], negatives: bool = True, size: tuple[int, int] | None = None
    ) -> list[dict[str, Tensor]]: ...

    def room(self) -> int: ...

    def velocity(
        self, latents: Tensor, timesteps: Tensor, embeds: dict[str, Tensor], rows: Tensor, sampler: Sampler
    ) -> Tensor: ...

    def decode(self, latents: Tensor, sampler: Sampler, slice_size: int | None) -> Tensor: ...

    def replay(self, trace: FlowTrace) -> Replay: ...

    def predict(self, trace: FlowTrace, noised: Noised) -> Tensor: ...

    def unsharded(self) -> AbstractContextManager[None]: ...

    def through(self, transformer: Any) -> "Policy":
        """The same policy computing with another engine's transformer."""
        ...

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the transformer, one after the other; all ranks must draw all of them."""
        ...

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Other weights for a while: 'reference', 'ema', or those of the algorithm."""
        ...


class Rollout(Protocol):
    """Samples images, with log-probabilities of the trained steps; `exact` says whether these are the policy's own."""

    exact: bool

    def awake(self) -> AbstractContextManager[None]: ...

    def sample(
        self, prompts: list[Prompt], *, seed: int, step: int, each: Callable[[Tensor, list[Prompt]], None]
    ) -> Samples: ...

    def sample_validation(self, prompts: list[Prompt], *, each: Callable[[Tensor, list[Prompt]], None]) -> None: ...


class Algorithm(Protocol):
    """The learning rule: pure, over the world. Rewards are [N], in the order of the samples' numbers.

    `forward`: it trains on fresh noise added to final images (Batch.noised), not on the sampled transitions.
    `behaviour`: the weights that sample; None: the policy's own. `others`: the weights whose view of the samples the
    loss wants, in Batch.views: "policy" (as they are before the step's first update, with `forward` before that of each
    pass), "reference", or names of `averages` or `experts`. `experts`: frozen models beside the policy. `averages`:
    copies of the weights that the algorithm keeps, in the checkpoint too; after training step number `step` (from 1)
    each becomes decay * itself + (1 - decay) * the policy's.
    """

    forward: bool
    behaviour: str | None
    others: tuple[str, ...]
    averages: tuple[str, ...]
    experts: tuple[Expert, ...]

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] float32."""
        ...

    def counts(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] bool: the samples that are trained on."""
        ...

    def units(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[U, s] numbers of samples: each row is trained as one, its samples side by side in a Batch."""
        ...

    def decay(self, name: str, step: int) -> float:
        """See `averages`."""
        ...

    def view(self, policy: Policy, batch: Batch) -> Tensor:
        """[B, ...] what the loss wants to know of other weights, computed by a policy that has them for now."""
        ...

    def loss(self, policy: Policy, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [U, W] of each unit and trained step, before its weight, and detached scalars."""
        ...


def select(trace: FlowTrace, rows: Tensor) -> FlowTrace:
    """The rows [b] of a trace; embeddings stay shared."""
    return replace(
        trace,
        latents=trace.latents[rows],
        means=trace.means[rows],
        clean=trace.clean[rows],
        prompt_index=trace.prompt_index[rows],
    )
