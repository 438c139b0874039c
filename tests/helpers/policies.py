"""Policies of tiny models on a world of one rank, inside the test process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config.flow import FlowDataConfig, FlowRolloutConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed.mesh import World
from phalanx.distributed.seed import fold_in, normal
from phalanx.models.flow.policy import FlowPolicy, build_policy
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.rollout.flow.denoise import Job
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.run.world import start_world, stop_world
from phalanx.types import Prompt, Samples

MAX_LENGTH = 64  # tokens of a prompt; Z-Image pads texts to 32, 64, ...
# Of different lengths, with and without a negative of their own.
PROMPTS = [Prompt("a cat", 0, {}), Prompt("two small dogs on a red sofa", 1, {}, negative="blur"), Prompt("x", 2, {})]


@contextmanager
def one_rank() -> Iterator[World]:
    """A world of only this process; its process groups are destroyed afterwards."""
    world = start_world(ParallelConfig())
    try:
        yield world
    finally:
        stop_world()


def make_policy(
    world: World,
    folder: Path,
    *,
    detach_uncond: bool = False,
    max_prompt_length: int = MAX_LENGTH,
    text_length_multiple: int = 32,
    embeds_cache_dir: Path | None = None,
    **model: Any,
) -> FlowPolicy:
    """The policy of a model folder in float32; `model` are keys of FlowModelConfig."""
    data = FlowDataConfig(
        max_prompt_length=max_prompt_length,
        text_length_multiple=text_length_multiple,
        embeds_cache_dir=None if embeds_cache_dir is None else str(embeds_cache_dir),
    )
    config = FlowModelConfig(**{"path": str(folder), "dtype": "float32"} | model)
    return build_policy(config, ParallelConfig(), data, world, seed=0, detach_uncond=detach_uncond)


def disturb(policy: FlowPolicy | LMPolicy, std: float = 0.05, seed: int = 0) -> None:
    """Change every trained weight, so that a LoRA, whose B is initially 0, has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.trained.parameters.values():
            p.add_(torch.randn(p.shape, generator=generator) * std)
    policy.trained.sharded.copy_to_module()


def make_rollout(policy: FlowPolicy, micro: int, *, guidance: float = 1.0, **rollout: Any) -> PolicyRollout:
    """Four steps at 32 x 48 pixels, unless `rollout` (keys of FlowRolloutConfig) changes them.

    `guidance` is the scale of classifier-free guidance; embedded guidance is 3.5.
    """
    keys = {"n": 2, "num_inference_steps": 4, "height": 32, "width": 48, policy.model.guidance_key: guidance}
    if policy.model.embedded_guidance_key is not None:
        keys[policy.model.embedded_guidance_key] = 3.5
    return PolicyRollout(policy, FlowRolloutConfig(**keys | rollout), policy.world, micro)


def sample(rollout: PolicyRollout, prompts: list[Prompt] = PROMPTS, step: int = 0) -> Samples:
    """One training step's samples, with their log-probs."""
    with rollout.awake():
        return rollout.sample(prompts, seed=0, step=step, each=lambda images, prompts: None)


def validated(rollout: PolicyRollout, prompts: list[Prompt] = PROMPTS) -> Tensor:
    """The images of a validation."""
    parts: list[Any] = []
    with rollout.awake():
        rollout.sample_validation(prompts, each=lambda images, prompts: parts.append(images))
    return torch.cat(parts)


def ode(rollout: PolicyRollout, prompts: list[Prompt] = PROMPTS) -> tuple[Tensor, Tensor]:
    """The rollout's images of prompts without noise in its steps, one per prompt, and the initial latents."""
    sampler = replace(rollout.sampler, noise_level=0.0)
    names = [(7, 0, p.group_id, 0) for p in prompts]
    shape = rollout.policy.model.latent_shape(sampler.height, sampler.width, sampler.num_frames)
    latents = torch.stack([normal(shape, fold_in(*name, "init"), torch.device("cpu")) for name in names])
    with rollout.awake():
        embeds, rows = rollout.collate(prompts), torch.arange(len(prompts))
        generated = rollout.generate(Job(sampler, rollout.schedule(sampler), embeds, rows, names, range(0)))
    assert generated.log_prob.shape == (len(prompts), 0)
    return generated.images, latents


def velocity(policy: FlowPolicy, guidance: float = 3.0, prompts: list[Prompt] = PROMPTS) -> Tensor:
    """The guided velocity [3, ...] of fixed latents, one for each of three prompts, with a gradient; videos have 5 frames."""
    rollout = make_rollout(policy, 3, guidance=guidance)
    embeds = rollout.collate(prompts)
    frames = 5 if policy.model.makes_videos else 1
    shape = policy.model.latent_shape(rollout.sampler.height, rollout.sampler.width, frames)
    latents = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    return policy.velocity(latents, torch.tensor([900.0, 500.0, 20.0]), embeds, torch.arange(3), rollout.sampler)
