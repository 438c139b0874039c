"""Wan image-to-video: parity with diffusers' pipeline, exact replays, and one condition for all samples of an image."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v
from torch import Tensor

from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.types import Prompt
from phalanx.zoo.families.wan_i2v import Model
from tests.helpers.checks import refused
from tests.helpers.policies import disturb, make_policy, make_rollout, ode, sample
from tests.helpers.tiny import tiny_wan
from tests.helpers.tiny_edit import edits, photo
from tests.helpers.tiny_i2v import load_i2v_pipeline, tiny_wan_i2v

KINDS = ("2.1", "2.2", "5b")
VIDEO = 5


@pytest.fixture(scope="module")
def folders(i2v_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("i2v")
    return {
        "2.1": tiny_wan_i2v(folder / "2.1"),
        "2.2": i2v_folder,
        "5b": tiny_wan(folder / "5b", multistep=False, per_token=True),
    }


@pytest.fixture(autouse=True)
def without_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock pipeline requires ftfy, which the text-to-video pipeline only uses if it is installed."""
    monkeypatch.setattr(pipeline_wan_i2v, "prompt_clean", pipeline_wan.prompt_clean)


def i2v_policy(world: World, folder: Path, **keys: Any) -> FlowPolicy:
    return make_policy(world, folder, **{"family": "wan_i2v", "max_prompt_length": 512} | keys)


def prompts() -> list[Prompt]:
    """Texts of different lengths, including an empty one and one that is truncated."""
    first, second, third = edits()
    return [first, replace(second, text=""), replace(third, text="a wide sky " * 20)]


def stock(folder: Path, rollout: PolicyRollout, latents: Tensor) -> Tensor:
    pipeline, sampler = load_i2v_pipeline(folder), rollout.sampler
    videos = [
        pipeline(
            p.meta["image"].pil(),
            p.text,
            negative_prompt=p.negative,
            height=sampler.height,
            width=sampler.width,
            num_frames=sampler.num_frames,
            num_inference_steps=4,
            guidance_scale=sampler.guidance,
            latents=latent[None],
            max_sequence_length=512,
            output_type="pt",
        ).frames
        for p, latent in zip(prompts(), latents, strict=True)
    ]
    return torch.cat(videos)


@pytest.mark.seldom("2.1-1.0", "2.2-4.5", "5b-1.0")
@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("kind", KINDS)
def test_videos_are_those_of_the_stock_pipeline(
    world: World, folders: dict[str, Path], kind: str, guidance: float
) -> None:
    frames, size = (9, {"height": 64, "width": 96}) if guidance > 1 else (VIDEO, {})
    rollout = make_rollout(i2v_policy(world, folders[kind]), 3, guidance=guidance, num_frames=frames, **size)
    ours, latents = ode(rollout, prompts())
    assert ours.shape[:3] == (3, frames, 3) and ours.std(0).mean() > 0.01
    torch.testing.assert_close(ours, stock(folders[kind], rollout, latents), rtol=0, atol=1e-4)


@pytest.mark.seldom("2.1")
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_exact(world: World, folders: dict[str, Path], kind: str) -> None:
    policy = i2v_policy(world, folders[kind], lora_rank=4, dtype="bfloat16")
    disturb(policy)
    samples = sample(make_rollout(policy, 4, guidance=3.0, num_frames=VIDEO), edits())
    assert samples.log_prob is not None and samples.log_prob.shape == (6, 2) and samples.log_prob.std() > 0
    for part in torch.arange(4).split(2):
        assert torch.equal(policy.replay(samples.trace.select(part)).log_prob, samples.log_prob[part])


def test_the_first_frame_that_is_kept_has_no_loss(world: World, folders: dict[str, Path]) -> None:
    """TI2V-5B: also with noise in the steps, all samples end in the given frame, with the velocity that leads there."""
    policy = i2v_policy(world, folders["5b"])
    samples = sample(make_rollout(policy, 4, guidance=3.0, num_frames=VIDEO), edits())
    trace = samples.trace
    condition = trace.embeds["condition"][trace.prompt_index]
    torch.testing.assert_close(trace.clean[:, :, :1], condition, rtol=0, atol=1e-5)
    noised = policy.corrupt(samples, [1] * 6, levels=2, distribution="uniform")
    velocity = policy.predict(trace, noised)[:, :, :, :1]
    target = (noised.noise - trace.clean[:, None])[:, :, :, :1]
    torch.testing.assert_close(velocity, target, rtol=0, atol=1e-4)


def test_a_condition_is_kept_once_and_differs_between_images(world: World, folders: dict[str, Path]) -> None:
    policy = i2v_policy(world, folders["2.1"])
    one, other = edits()[:2]
    found = policy.embed([one, other], True, (32, 48, VIDEO))
    for name, shape in (("condition", (4, 2, 8, 12)), ("image_embeds", (5, 32))):
        assert found[0][name].shape == shape and found[0][name] is found[2][name]
        assert (found[0][name] - found[1][name]).abs().mean() > 1e-2
    longer, again = (policy.embed([one], False, (32, 48, frames))[0] for frames in (9, VIDEO))
    assert longer["condition"].shape == (4, 3, 8, 12) and again["condition"] is found[0]["condition"]
    model = policy.model
    assert isinstance(model, Model)
    drawn = model.embeds_like(len(found[0]["prompt_embeds"]), 32, 48, VIDEO)
    shapes = {name: (t.shape, t.dtype) for name, t in drawn.items() if name != "padded_length"}
    assert shapes == {name: (t.shape, t.dtype) for name, t in found[0].items() if name != "padded_length"}
    assert model.flops(32, 48, 512, VIDEO) > 0
    # the velocity depends on CLIP's features
    rollout = make_rollout(policy, 1, num_frames=VIDEO)
    latents = torch.zeros(1, *model.latent_shape(32, 48, VIDEO))
    batch = model.collate(found[:1], 512, False)
    other_batch = batch | {"image_embeds": found[1]["image_embeds"][None]}
    with torch.no_grad():
        a, b = (
            policy.velocity(latents, torch.tensor([500.0]), embeds, torch.tensor([0]), rollout.sampler)
            for embeds in (batch, other_batch)
        )
    assert (a - b).abs().mean() > 1e-4


def test_folders_and_sizes_that_are_refused(world: World, folders: dict[str, Path], wan_folder: Path) -> None:
    with refused("rollout.num_frames: 1 is only the given image; expected more frames, which follow it"):
        make_rollout(i2v_policy(world, folders["2.2"]), 1)
    with refused(
        "data.max_prompt_length: 256: expected 512, since the transformer takes the last 512 tokens for the text and those "
        "before for the image"
    ):
        i2v_policy(world, folders["2.1"], max_prompt_length=256)
    with pytest.raises(ValueError, match="has 4 channels of input; expected 12, as of an image-to-video model"):
        i2v_policy(world, wan_folder)
    assert photo(0).size == (96, 64)
