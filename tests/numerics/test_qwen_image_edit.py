"""Qwen-Image-Edit against diffusers' own pipelines: both encodings of an image, and their use in replays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor

from phalanx.distributed.mesh import World
from phalanx.distributed.seed import normal
from phalanx.media.pictures import Picture
from phalanx.models.flow.policy import FlowPolicy
from phalanx.models.flow.references import to_ratio
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.types import JobError, Prompt
from phalanx.zoo.families.qwen_image_edit import Model, cut_text
from tests.helpers.checks import refused
from tests.helpers.policies import MAX_LENGTH, disturb, make_policy, make_rollout, ode, sample, validated
from tests.helpers.tiny_edit import edits, load_edit_pipeline, photo, tiny_qwen_image_edit

SIDE = 64  # root of the area of a reference for the VAE
AREA = pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE


@pytest.fixture(autouse=True)
def small_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the stock pipelines' areas of references, 1024 squared, to ours."""
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", SIDE**2)
    whole = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: whole(SIDE**2, ratio))


def edit_policy(world: World, folder: Path, **keys: Any) -> FlowPolicy:
    return make_policy(world, folder, reference_size=SIDE, **keys)


def stock_images(folder: Path, rollout: PolicyRollout, prompts: list[Prompt], latents: Tensor) -> Tensor:
    """Images [P, 3, H, W]; the pipeline takes one prompt at a time."""
    pipeline, sampler = load_edit_pipeline(folder), rollout.sampler
    return torch.cat(
        [
            pipeline(
                [part.pil() for part in p.meta["image"].parts] if p.meta["image"].count > 1 else p.meta["image"].pil(),
                p.text,
                negative_prompt=" " if p.negative is None else p.negative,
                true_cfg_scale=sampler.guidance,
                height=sampler.height,
                width=sampler.width,
                num_inference_steps=sampler.num_inference_steps,
                latents=noise[None],
                output_type="pt",
            ).images
            for p, noise in zip(prompts, latents, strict=True)
        ]
    )


@pytest.mark.quick("2509-4.0", "2511-1.0", "2508-4.0")
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("kind", ["2509", "2511", "2508"])
def test_images_are_those_of_the_stock_pipeline(
    kind: str, guidance: float, world: World, qwen_edit_folder: Path, tmp_path: Path
) -> None:
    folder = qwen_edit_folder
    if kind != "2509":
        folder = tiny_qwen_image_edit(tmp_path / "model", first=kind == "2508", zero_cond_t=kind == "2511")
    policy = edit_policy(world, folder)
    assert policy.model.transformer.config.zero_cond_t == (kind == "2511")
    rollout = make_rollout(policy, 3, guidance=guidance)
    ours, latents = ode(rollout, edits())
    assert ours.shape == (3, 3, 32, 48) and ours.std(0).mean() > 0.01
    torch.testing.assert_close(ours, stock_images(folder, rollout, edits(), latents), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("each", "guidance"), [(2, 4.0), (3, 1.0)])
def test_images_of_several_references_are_those_of_the_stock_pipeline(
    each: int, guidance: float, world: World, qwen_edit_folder: Path
) -> None:
    policy, prompts = edit_policy(world, qwen_edit_folder, reference_count=each), edits(each=each)
    rollout = make_rollout(policy, 3, guidance=guidance)
    images, latents = ode(rollout, prompts)
    torch.testing.assert_close(images, stock_images(qwen_edit_folder, rollout, prompts, latents), rtol=0, atol=1e-4)
    model = policy.model
    embeds = policy.embed(prompts, negatives=True, size=(32, 48))
    assert embeds[0]["reference"].shape == model.embeds_like(40, 32, 48)["reference"].shape
    assert torch.equal(embeds[0]["reference"], embeds[3]["reference"])
    assert len(embeds[0]["prompt_embeds"]) <= model.most_tokens(MAX_LENGTH, 32, 48)
    samples = sample(make_rollout(policy, 4, guidance=guidance), prompts)
    assert samples.log_prob is not None
    # two samples have two trained steps each: a pass of as many rows as the rollout's micro-batch of 4
    replayed = [policy.replay(samples.trace.select(torch.arange(i, i + 2))).log_prob for i in (0, 2)]
    assert torch.equal(torch.cat(replayed), samples.log_prob[:4])


def test_another_number_of_references_ends_the_job(world: World, qwen_edit_folder: Path) -> None:
    rollout = make_rollout(edit_policy(world, qwen_edit_folder), 1)
    with refused("edits 0 holds 2 images; model.reference_count is 1", JobError):
        rollout.encode([edits(each=2)[:1]])


def test_both_encoders_see_the_image(world: World, qwen_edit_folder: Path) -> None:
    """Another image changes both encodings; the negative prompt is encoded with the image too."""
    policy = edit_policy(world, qwen_edit_folder)
    one, other = edits()[:2]
    seen = Prompt(one.text, 0, other.meta)
    found = policy.embed([one, seen], True, (32, 48))
    model = policy.model
    assert isinstance(model, Model)
    rows, columns = (side // 8 for side in model.reference_size(32, 48))
    for name, shape in (("reference", (rows * columns, 16)), ("prompt_embeds", found[0]["prompt_embeds"].shape)):
        values = [embeds[name] for embeds in found]
        assert values[0].shape == values[1].shape == shape
        assert (values[0] - values[1]).abs().mean() > 1e-2
        assert (values[2] - values[3]).abs().mean() > 1e-2  # of the negatives
    assert found[0]["reference"] is found[2]["reference"]  # of a prompt and its negative
    anew, wider = (policy.embed(edits(1), False, size)[0]["reference"] for size in ((32, 48), (32, 64)))
    assert anew is found[0]["reference"] and wider.shape != anew.shape
    # the policy's velocity depends on each tensor
    rollout = make_rollout(policy, 1)
    latents = normal(model.latent_shape(32, 48), 0, torch.device("cpu"))[None]
    mixed = found[0] | {"reference": found[1]["reference"]}
    with torch.no_grad():
        a, b, c = (
            policy.velocity(
                latents,
                torch.tensor([500.0]),
                model.collate([embeds], len(embeds["prompt_embeds"]), False),
                torch.tensor([0]),
                rollout.sampler,
            )
            for embeds in (found[0], mixed, found[1])
        )
    assert a.shape == latents.shape
    assert (a - b).abs().mean() > 1e-3 and (b - c).abs().mean() > 1e-4


def test_latents_of_the_reference_are_those_of_the_vae(world: World, qwen_edit_folder: Path) -> None:
    policy = edit_policy(world, qwen_edit_folder)
    prompt = edits(1)[0]
    found = policy.embed([prompt], False, (64, 64))[0]["reference"]
    pixels = Picture.pixels(prompt.meta["image"], 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(found, policy.model.encode_images(pixels[None])[0], rtol=0, atol=1e-5)


def test_a_reference_is_cut_to_the_ratio_of_the_images(world: World, qwen_edit_folder: Path) -> None:
    model = edit_policy(world, qwen_edit_folder).model
    assert isinstance(model, Model)
    assert model.reference_size(32, 32) == (64, 64)
    assert model.reference_size(32, 64) == (32, 96)  # 64 / sqrt 2 and 64 sqrt 2, to multiples of 32
    assert to_ratio(photo(0, 96, 64), 32, 48).size == (96, 64)
    assert to_ratio(photo(0, 96, 64), 32, 32).size == (64, 64)
    assert to_ratio(photo(0, 96, 64), 64, 16).size == (16, 64)
    left = Image.new("RGB", (90, 30))
    left.paste((255, 0, 0), (30, 0, 60, 30))
    assert to_ratio(left, 8, 8).getcolors() == [(900, (255, 0, 0))]
    with refused("model.reference_size: too small for images of 8 x 160 pixels"):
        make_rollout(edit_policy(world, qwen_edit_folder), 1, height=8, width=160)


def test_instructions_are_cut(world: World, qwen_edit_folder: Path) -> None:
    model = edit_policy(world, qwen_edit_folder).model
    assert isinstance(model, Model)
    words = model.pipeline.tokenizer
    assert cut_text(words, "make it red", 64) == "make it red" and cut_text(words, "xyz äö", 5) == "xyz "
    prompt, same = Prompt("abcdef", 0, edits(1)[0].meta), Prompt("abcxyz", 0, edits(1)[0].meta)
    cut = make_policy(world, qwen_edit_folder, max_prompt_length=3, reference_size=SIDE)
    one, other = cut.embed([prompt, same], False, (32, 48))
    assert torch.equal(one["prompt_embeds"], other["prompt_embeds"])
    assert (
        len(one["prompt_embeds"]) <= model.most_tokens(3, 32, 48) + 16
    )  # the tiny tokenizer has one token per byte of the template


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize(("lora_rank", "dtype"), [(0, "float32"), (4, "float32"), (4, "bfloat16")])
def test_replay_is_exact(guidance: float, lora_rank: int, dtype: str, world: World, qwen_edit_folder: Path) -> None:
    """Bit-equal at equal shapes."""
    policy = edit_policy(world, qwen_edit_folder, lora_rank=lora_rank, dtype=dtype)
    disturb(policy)
    rollout = make_rollout(policy, 6, guidance=guidance, sde_window_size=1)
    samples = sample(rollout, edits())
    assert samples.trace.embeds["reference"].shape[0] == (6 if guidance > 1 else 3)
    with torch.no_grad():
        assert torch.equal(policy.replay(samples.trace).log_prob, samples.log_prob)


def test_validation_may_have_a_size_of_its_own(world: World, qwen_edit_folder: Path) -> None:
    from phalanx.config.flow import FlowValRolloutConfig

    policy = edit_policy(world, qwen_edit_folder)
    rollout = make_rollout(policy, 2, val=FlowValRolloutConfig(height=32, width=32))
    seen = validated(rollout, edits())
    assert seen.shape == (3, 3, 32, 32)
    assert torch.equal(seen, validated(make_rollout(policy, 2, height=32, width=32), edits()))


def test_the_cache_tells_images_apart(world: World, qwen_edit_folder: Path, tmp_path: Path) -> None:
    def files(side: int, prompts: list[Prompt], size: tuple[int, int]) -> int:
        policy = make_policy(world, qwen_edit_folder, reference_size=side, embeds_cache_dir=tmp_path / "cache")
        policy.embed(prompts, False, size)
        return len(list((tmp_path / "cache").rglob("*.safetensors")))

    one, other = edits()[:2]
    assert files(64, [one], (32, 48)) == 1
    assert files(64, edits(1), (32, 48)) == 1  # the same picture, read again
    assert files(64, [Prompt(one.text, 0, other.meta)], (32, 48)) == 2
    assert files(64, [one], (32, 32)) == 3
    assert files(96, [one], (32, 32)) == 4


def test_an_image_that_cannot_be_read_ends_the_job(world: World, qwen_edit_folder: Path, tmp_path: Path) -> None:
    rollout = make_rollout(edit_policy(world, qwen_edit_folder), 1)
    gone = Prompt("x", 0, {"image": Picture(lambda: "gone.png", tmp_path, "data.train_files: edits.jsonl:3: image")})
    with refused(
        "data.train_files: edits.jsonl:3: image: the image cannot be read: No such file or directory: "
        f"'{tmp_path / 'gone.png'}'",
        JobError,
    ):
        rollout.encode([[gone]])
