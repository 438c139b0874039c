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
    """How images are denoised: sizes in pixels, `guidance` scale (1: off), `noise_level` eta of stochastic steps."""

    num_inference_steps: int
    height: int
    width: int
    guidance: float
    noise_level: float
    sde_type: str


@dataclass(frozen=True)
class FlowTrace:
    """What a replay of the trained denoising steps needs.

    latents [B, W + 1, ...] float32: the samples before each trained step and after the last; sigmas [W + 1] and
    timesteps [W]: noise levels in 0..1 and the scheduler's timesteps; `sigma_max` the schedule's second entry;
    `embeds` text embeddings by name, each [P, ...] or under guidance [2 P, ...]: the prompts, then their negatives;
    `prompt_index` [B] into the prompts.
    """

    sampler: Sampler

    latents: Tensor
    sigmas: Tensor
    timesteps: Tensor
    sigma_max: float
    embeds: dict[str, Tensor]
    prompt_index: Tensor


@dataclass(frozen=True)
class Samples:
    """Images that this rank sampled: `outputs` [B, 3, H, W] in 0..1 on the CPU, `log_prob` [B, W] or None.

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
class Batch:
    """Samples of one forward and backward pass.

    log_prob, weight [B, W]; advantage [B]. `weight` already holds the world's denominator, and is 0 for samples
    that do not count. `ref_mean` [B, W, ...] is the reference's transition mean where a KL term wants it.
    """

    trace: FlowTrace
    log_prob: Tensor
    advantage: Tensor
    weight: Tensor
    ref_mean: Tensor | None = None


@dataclass(frozen=True)
class Replay:
    """The policy's view of given transitions: log_prob [B, W], mean [B, W, ...], std [W]; float32."""

    log_prob: Tensor
    mean: Tensor
    std: Tensor


class TextToImage(Protocol):
    """What sampling needs to know of a model; see phalanx.models.family.FlowModel."""

    pipeline_class: str
    guidance_key: str
    transformer: Any
    dtype: torch.dtype

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]: ...

    def schedule(self, num_inference_steps: int, height: int, width: int) -> tuple[Tensor, Tensor]: ...

    def collate(self, embeds: list[dict[str, Tensor]], length: int, padded: bool) -> dict[str, Tensor]: ...


class Policy(Protocol):
    """The trained model; see phalanx.models.flow.FlowPolicy."""

    @property
    def model(self) -> TextToImage: ...

    def embed(self, prompts: list[Prompt], negatives: bool = True) -> list[dict[str, Tensor]]: ...

    def velocity(
        self, latents: Tensor, timesteps: Tensor, embeds: dict[str, Tensor], rows: Tensor, sampler: Sampler
    ) -> Tensor: ...

    def decode(self, latents: Tensor, sampler: Sampler, slice_size: int | None) -> Tensor: ...

    def replay(self, trace: FlowTrace) -> Replay: ...

    def unsharded(self) -> AbstractContextManager[None]: ...

    def through(self, transformer: Any) -> "Policy":
        """The same policy computing with another engine's transformer."""
        ...

    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights of the transformer, one after the other; all ranks must draw all of them."""
        ...

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Other weights for a while: 'reference' or 'ema'."""
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
    """The learning rule: pure, over the world."""

    needs_reference: bool

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor: ...

    def loss(self, policy: Policy, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]: ...


def select(trace: FlowTrace, rows: Tensor) -> FlowTrace:
    """The rows [b] of a trace; embeddings stay shared."""
    return replace(trace, latents=trace.latents[rows], prompt_index=trace.prompt_index[rows])
