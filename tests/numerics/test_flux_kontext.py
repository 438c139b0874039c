"""FLUX.1 Kontext against diffusers' own pipeline: the image to edit, and its use in replays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from torch import Tensor

from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy
from phalanx.models.flow.references import References
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.types import Prompt
from phalanx.zoo.families.flux_kontext import Model
from tests.helpers.checks import refused
from tests.helpers.policies import disturb, make_policy, make_rollout, ode, sample
from tests.helpers.tiny import load_pipeline
from tests.helpers.tiny_edit import edits

SIDE = 64  # root of the area of a reference


def kontext_policy(world: World, folder: Path, **keys: Any) -> FlowPolicy:
    return make_policy(world, folder, reference_size=SIDE, **keys)


def stock_images(
    folder: Path, rollout: PolicyRollout, prompts: list[Prompt], latents: Tensor, length: int = 64
) -> Tensor:
    """Images [P, 3, H, W]; the pipeline takes one image at a time."""
    pipeline, sampler = load_pipeline(folder), rollout.sampler
    images = []
    for prompt, noise in zip(prompts, latents, strict=True):
        made = pipeline(
            prompt.meta["image"].pil(),
            prompt.text,
            negative_prompt=prompt.negative or "",
            true_cfg_scale=sampler.guidance,
            guidance_scale=sampler.embedded_guidance,
            height=sampler.height,
            width=sampler.width,
            max_area=sampler.height * sampler.width,
            num_inference_steps=sampler.num_inference_steps,
            latents=noise[None],
            max_sequence_length=length,
            output_type="pt",
        )
        images.append(made.images)
    return torch.cat(images)


@pytest.mark.parametrize(("guidance", "scale", "length"), [(1.0, 2.5, 64), (3.0, 1.0, 6)])
def test_images_are_those_of_the_stock_pipeline(
    guidance: float, scale: float, length: int, world: World, flux_kontext_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instructions include one that is truncated and an empty one."""
    policy = kontext_policy(world, flux_kontext_folder, max_prompt_length=length)
    assert isinstance(policy.model, Model)
    height, width = policy.model.references.size(32, 48)
    assert (height, width) == (56, 80)  # 64 / sqrt 1.5 and 64 sqrt 1.5, to multiples of 8
    # the stock pipeline's list of reference sizes, scaled to ours
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(width, height)])
    first, second, third = edits()
    prompts = [Prompt("", 0, first.meta), second, third]
    rollout = make_rollout(policy, 3, guidance=guidance, guidance_scale=scale)
    ours, latents = ode(rollout, prompts)
    assert ours.shape == (3, 3, 32, 48) and ours.std(0).mean() > 0.01
    stock = stock_images(flux_kontext_folder, rollout, prompts, latents, length)
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)
    other = [Prompt(p.text, p.group_id, edits(1)[0].meta, negative=p.negative) for p in prompts]
    assert (ode(rollout, other)[0][1:] - ours[1:]).abs().mean() > 1e-3  # with another image


def test_the_sizes_of_references_are_those_that_the_model_was_trained_on() -> None:
    """Or one token longer or shorter, if samples have such an aspect ratio."""
    references = References(1024, 16)
    for w, h in pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS:
        height, width = references.size(h, w)
        assert abs(height - h) + abs(width - w) <= 16
    assert references.size(512, 512) == (1024, 1024) and References(512, 16).size(512, 768) == (416, 624)


def test_a_reference_is_one_tensor(world: World, flux_kontext_folder: Path) -> None:
    """A prompt and its negative share the reference; another output size has another."""
    policy = kontext_policy(world, flux_kontext_folder)
    one, other = edits()[:2]
    found = policy.embed([one, other], True, (32, 48))
    assert found[0]["reference"] is found[2]["reference"]
    assert found[0]["reference"].shape == (7 * 10, 16)
    assert (found[0]["reference"] - found[1]["reference"]).abs().mean() > 1e-2
    assert policy.embed([one], False, (32, 32))[0]["reference"].shape == (8 * 8, 16)
    assert policy.model.split_tokens(32, 48, 1, 64) == {"an image of 32 x 48": 24 + 70, "data.max_prompt_length": 64}
    with refused("model.reference_size: too small for images of 8 x 2048 pixels"):
        make_rollout(policy, 1, height=8, width=2048)


@pytest.mark.parametrize(("lora_rank", "dtype", "guidance"), [(0, "float32", 1.0), (4, "bfloat16", 3.0)])
def test_replay_is_exact(lora_rank: int, dtype: str, guidance: float, world: World, flux_kontext_folder: Path) -> None:
    policy = kontext_policy(world, flux_kontext_folder, lora_rank=lora_rank, dtype=dtype)
    disturb(policy)
    samples = sample(make_rollout(policy, 6, guidance=guidance, sde_window_size=1), edits())
    assert samples.log_prob is not None and samples.log_prob.std() > 0
    with torch.no_grad():
        assert torch.equal(policy.replay(samples.trace).log_prob, samples.log_prob)


def test_the_count_of_flops_includes_the_reference(world: World, flux_kontext_folder: Path) -> None:
    small, large = (
        make_policy(world, flux_kontext_folder, reference_size=side).model.flops(32, 48, 64) for side in (32, 128)
    )
    assert large > 1.5 * small
