"""HunyuanVideo 1.5: parity with diffusers' pipeline, exact replays, sizes, arithmetic, and rejected folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.distributed.mesh import World
from phalanx.types import Prompt
from phalanx.zoo.families.hunyuan_video_15 import GLYPHS, IMAGE, Model
from tests.helpers.checks import refused
from tests.helpers.policies import MAX_LENGTH, PROMPTS, disturb, make_policy, make_rollout, ode, sample
from tests.helpers.tiny import load_pipeline
from tests.helpers.tiny_edit import edits
from tests.helpers.tiny_hunyuan import tiny_hunyuan_video_15
from tests.numerics.test_wan import edited

VIDEO = 5  # frames: two of the latent
# a quoted word, a text that is truncated, and an empty text
TEXTS = [
    Prompt('a sign that says "zeta" and “eta”', 0, {}, negative='"blur"'),
    Prompt("two small dogs on a red sofa, " * 4, 1, {}),
    Prompt("", 2, {}, negative="x"),
]


def stock(pipeline: Any, guidance: float, frames: int, latents: Tensor, prompts: list[Prompt]) -> Tensor:
    """Videos [3, F, 3, 32, 48] of diffusers' pipeline, one at a time."""
    pipeline.guider.guidance_scale, pipeline.tokenizer_max_length = guidance, MAX_LENGTH
    # fewer tokens that are not attended to: those of the absent image, and padding
    pipeline.vision_num_semantic_tokens, pipeline.tokenizer_2_max_length = 9, 64
    keys = {"height": 32, "width": 48, "num_frames": frames, "num_inference_steps": 4, "output_type": "pt"}
    videos = []
    for prompt, latent in zip(prompts, latents, strict=True):
        videos.append(pipeline(prompt.text, negative_prompt=prompt.negative, latents=latent[None], **keys).frames)
    return torch.cat(videos)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize(("frames", "prompts"), [(1, PROMPTS), (VIDEO, TEXTS)], ids=["image", "video"])
def test_videos_are_those_of_the_stock_pipeline(
    world: World, hunyuan_folder: Path, frames: int, prompts: list[Prompt], guidance: float
) -> None:
    rollout = make_rollout(make_policy(world, hunyuan_folder), 3, guidance=guidance, num_frames=frames)
    videos, latents = ode(rollout, prompts)
    theirs = stock(load_pipeline(hunyuan_folder), guidance, frames, latents, prompts)
    assert theirs.shape == (3, frames, 3, 32, 48) and videos.dtype == torch.float32
    assert videos.std(0).mean() > 0.01  # three different ones
    torch.testing.assert_close(videos, theirs if frames > 1 else theirs[:, 0], rtol=0, atol=1e-4)


def test_tokens_of_a_text(world: World, hunyuan_folder: Path) -> None:
    """Tokens of quoted words follow, if there are any; the check for too long prompts counts the same tokens."""
    model = make_policy(world, hunyuan_folder).model
    quoted, cut, empty = model.encode([p.text for p in TEXTS], torch.device("cpu"), MAX_LENGTH)
    glyphs = len(model.pipeline.tokenizer_2('Text "zeta". Text "eta". ')["input_ids"])
    assert [(e["kinds"] == GLYPHS).sum().item() for e in (quoted, cut, empty)] == [glyphs, 0, 0]
    assert (quoted["prompt_embeds"][-glyphs:, 32:] == 0).all() and quoted["prompt_embeds"][-1, :32].std() > 0
    assert len(cut["kinds"]) == MAX_LENGTH
    _, tokens, read = model.text_tokens([p.text for p in TEXTS], MAX_LENGTH)
    assert read == MAX_LENGTH and len(tokens[1]) > MAX_LENGTH
    assert [len(tokens[0]) + glyphs, len(tokens[2])] == [len(quoted["kinds"]), len(empty["kinds"])]


def test_padding_of_the_text_changes_nothing(world: World, hunyuan_folder: Path) -> None:
    model = make_policy(world, hunyuan_folder).model
    embeds = model.encode(['a "cat"'], torch.device("cpu"), 32)
    n = len(embeds[0]["prompt_embeds"])
    latents = torch.randn(1, *model.latent_shape(32, 48, VIDEO), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        short, long = (
            model.velocity(latents, torch.tensor([500.0]), model.collate(embeds, length, padded), 32, 48)
            for length, padded in ((n, False), (n + 9, True))
        )
    torch.testing.assert_close(short, long, rtol=0, atol=1e-5)


def test_levels_and_timesteps(world: World, hunyuan_folder: Path) -> None:
    """5 t / (1 + 4 t); the transformer gets timesteps rounded as in the pipeline."""
    policy, pipeline = make_policy(world, hunyuan_folder, dtype="bfloat16"), load_pipeline(hunyuan_folder)
    sigmas, timesteps = policy.model.schedule(4, 32, 48)
    torch.testing.assert_close(sigmas, torch.tensor([1.0, 15 / 16, 5 / 6, 5 / 8, 0.0]))
    assert policy.model.shift(4, 32, 48) == 5
    seen: list[list[float]] = []
    pipeline = pipeline.to(torch.bfloat16)
    for transformer in (policy.model.transformer, pipeline.transformer):
        times = seen.append([]) or seen[-1]
        transformer.time_embed.register_forward_pre_hook(
            lambda module, args, times=times: times.append(args[0][0].item())
        )
    _, latents = ode(make_rollout(policy, 1), PROMPTS[:1])
    stock(pipeline, 1.0, 1, latents, PROMPTS[:1])
    assert len(seen[0]) == 4 and seen[0] == seen[1]
    torch.testing.assert_close(timesteps, sigmas[:-1] * 1000)


def test_layers_that_get_a_lora(world: World, hunyuan_folder: Path) -> None:
    names = make_policy(world, hunyuan_folder, lora_rank=2).trained.parameters
    layers = {name.rsplit(".lora_", 1)[0] for name in names}
    assert {name.split(".", 2)[2] for name in layers if name.startswith("transformer_blocks")} == set(
        Model.lora_targets
    )


def test_images_are_encoded_as_they_are_decoded(world: World, hunyuan_folder: Path) -> None:
    model = make_policy(world, hunyuan_folder).model
    latents = model.encode_images(torch.rand(2, 3, 32, 48))
    assert latents.shape == (2, *model.latent_shape(32, 48))
    moments = model.vae.encode(torch.zeros(1, 3, 1, 32, 48)).latent_dist.mode() * model.vae.config.scaling_factor
    torch.testing.assert_close(model.encode_images(torch.full((1, 3, 32, 48), 0.5)), moments)


def test_sizes(world: World, hunyuan_folder: Path, hunyuan_i2v_folder: Path) -> None:
    model = make_policy(world, hunyuan_folder).model
    assert model.latent_shape(32, 48) == (4, 1, 8, 12) and model.latent_shape(36, 48, 9) == (4, 3, 9, 12)
    for size, message in (
        ((32, 48, 6), "rollout.num_frames: 6 should be 1 more than a multiple of 4, e.g. 5 or 9"),
        ((34, 48, 5), "rollout.height: 34 should be a multiple of 4, e.g. 32 or 36"),
    ):
        with refused(message):
            model.latent_shape(*size)
    with refused("rollout.num_frames: 1 is only the given image; expected more frames, which follow it"):
        make_rollout(make_policy(world, hunyuan_i2v_folder), 1)


def test_folders_that_are_refused(world: World, hunyuan_folder: Path, tmp_path: Path) -> None:
    guider = "guider/guider_config.json"
    plain = (
        "should be a ClassifierFreeGuidance with {'guidance_rescale': 0, 'use_original_formulation': False, "
        "'start': 0, 'stop': 1, 'enabled': True}"
    )
    for name, file, key, message in (
        ("rescaled", guider, {"guidance_rescale": 0.7}, plain),
        ("late", guider, {"start": 0.1}, plain),
    ):
        folder = edited(hunyuan_folder, tmp_path / name, file, lambda config, key=key: config.update(key))
        with pytest.raises(ValueError) as error:
            make_policy(world, folder)
        assert str(error.value).startswith("model.path: ") and str(error.value).endswith(message)
    few = tiny_hunyuan_video_15(tmp_path / "few", use_meanflow=True)
    with refused(f"model.path: '{few}' is distilled to few steps (use_meanflow), which is not supported"):
        make_policy(world, few)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_videos_of_images_are_those_of_the_stock_pipeline(
    world: World, hunyuan_i2v_folder: Path, guidance: float
) -> None:
    """At the size that the pipeline chooses for the image, and crops it to."""
    prompts, pipeline = edits(), load_pipeline(hunyuan_i2v_folder)
    height, width = pipeline.video_processor.calculate_default_height_width(height=64, width=96, target_size=32)
    size = {"height": int(height), "width": int(width), "num_frames": VIDEO}
    policy = make_policy(world, hunyuan_i2v_folder)
    videos, latents = ode(make_rollout(policy, 3, guidance=guidance, **size), prompts)
    pipeline.guider.guidance_scale, pipeline.tokenizer_max_length, theirs = guidance, MAX_LENGTH, []
    keys = {"num_frames": VIDEO, "num_inference_steps": 4, "output_type": "pt"}
    for prompt, latent in zip(prompts, latents, strict=True):
        image = prompt.meta["image"].pil()
        made = pipeline(image, prompt.text, negative_prompt=prompt.negative, latents=latent[None], **keys)
        theirs.append(made.frames)
    assert theirs[0].shape == (1, VIDEO, 3, height, width) and videos.std(0).mean() > 0.01
    torch.testing.assert_close(videos, torch.cat(theirs), rtol=0, atol=1e-4)


@pytest.mark.full
def test_log_probs_of_videos_of_images_are_exact(world: World, hunyuan_i2v_folder: Path) -> None:
    policy = make_policy(world, hunyuan_i2v_folder, lora_rank=4, dtype="bfloat16")
    disturb(policy)
    samples = sample(make_rollout(policy, 4, guidance=3.0, num_frames=VIDEO), edits())
    assert samples.log_prob is not None and samples.log_prob.std() > 0
    for part in torch.arange(4).split(2):
        assert torch.equal(policy.replay(samples.trace.select(part)).log_prob, samples.log_prob[part])
    one, other = policy.embed(edits()[:1], negatives=True, size=(32, 48))
    assert torch.equal(one["first"], other["first"]) and one["first"].shape == (4, 8, 12)
    assert (one["kinds"] == IMAGE).sum() == 4 and len(one["kinds"]) <= policy.model.most_tokens(MAX_LENGTH, 32, 48)
