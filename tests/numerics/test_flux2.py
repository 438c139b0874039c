"""FLUX.2: features of dev and distilled Klein; test_models.py tests what Klein base shares with other families."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline

from phalanx.distributed.mesh import World
from phalanx.types import Prompt
from tests.helpers.checks import refused
from tests.helpers.policies import PROMPTS, disturb, make_policy, make_rollout, ode, sample
from tests.helpers.tiny import load_pipeline
from tests.helpers.tiny_edit import edits
from tests.helpers.tiny_flux2 import tiny_flux2_klein
from tests.numerics.test_models import assert_stock, stock_images


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_images_of_dev_are_those_of_the_stock_pipeline(scale: float, world: World, flux2_folder: Path) -> None:
    """The guidance scale is an input; with an empty prompt, and one that is truncated."""
    prompts = [Prompt("", 0, {}), Prompt("a red sofa " * 20, 1, {}), PROMPTS[1]]
    rollout = make_rollout(make_policy(world, flux2_folder), 3, guidance_scale=scale)
    assert not rollout.sampler.guided and rollout.sampler.embedded_guidance == scale
    ours, latents = assert_stock(rollout, flux2_folder, prompts)
    assert ours.shape == (3, 3, 32, 48) and ours.std(0).mean() > 0.01
    other = make_rollout(rollout.policy, 3, guidance_scale=scale + 1)
    assert (ours - stock_images(load_pipeline(flux2_folder), other, prompts, latents, 64)).abs().max() > 1e-3


def test_images_of_klein_are_those_of_the_stock_pipeline(world: World, tmp_path: Path) -> None:
    policy = make_policy(world, tiny_flux2_klein(tmp_path, distilled=True))
    rollout = make_rollout(policy, 3, height=48, width=32)
    assert not rollout.sampler.guided and rollout.sampler.embedded_guidance is None
    prompts = [Prompt("", 0, {}), Prompt("a red sofa " * 20, 1, {}), PROMPTS[1]]
    assert_stock(rollout, tmp_path, prompts)
    with refused(
        "rollout.guidance_scale: 4: the model is distilled to do without classifier-free guidance; set it to 1"
    ):
        make_rollout(policy, 3, guidance_scale=4.0)
    with refused("rollout.true_cfg_scale: 2 has no effect on this model; its guidance is rollout.guidance_scale"):
        make_rollout(policy, 3, true_cfg_scale=2.0)


def test_dev_has_one_branch(world: World, flux2_folder: Path) -> None:
    with refused(
        "rollout.true_cfg_scale: 2: the model is distilled to do without classifier-free guidance; set it to 1"
    ):
        make_rollout(make_policy(world, flux2_folder), 3, true_cfg_scale=2.0)


def test_tokens_of_dev_are_those_of_the_pipeline(world: World, flux2_folder: Path) -> None:
    """Tokens of a text begin with those of the system message."""
    policy = make_policy(world, flux2_folder)
    seen: list[Any] = []
    handle = policy.model.pipeline.text_encoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"][0, kwargs["attention_mask"][0].bool()].tolist()),
        with_kwargs=True,
    )
    texts = ["a cat", "[IMG]x"]
    for text in texts:
        policy.model.encode([text], torch.device("cpu"), 64)
    handle.remove()
    tokenizer, tokens, limit = policy.model.text_tokens(texts, 64)
    assert tokens == seen and limit == 64
    assert tokenizer.decode(tokens[0]).endswith("actions without speculation.<|im_end|><|im_start|>a cat<|im_end|>")


def test_the_schedule_depends_on_the_number_of_steps(world: World, flux2_klein_folder: Path) -> None:
    """mu by hand: linear in the steps between 10 and 200, at which it is linear in the number of tokens."""
    model = make_policy(world, flux2_klein_folder).model
    for steps, (height, width), tokens in ((4, (32, 48), 24), (50, (64, 32), 32), (8, (512, 640), 5120)):
        sigmas, timesteps = model.schedule(steps, height, width)
        few, many = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
        mu = many if tokens > 4300 else many + (few - many) * (200 - steps) / 190
        even = np.arange(steps, 0, -1) / steps
        expected = np.exp(mu) / (np.exp(mu) + 1 / even - 1)
        assert sigmas[:-1].tolist() == pytest.approx(expected.tolist(), abs=1e-6) and sigmas[-1] == 0
        assert model.shift(steps, height, width) == pytest.approx(np.exp(mu))
        torch.testing.assert_close(timesteps, sigmas[:-1] * 1000)


def test_latents_are_patches_with_the_statistics_of_the_vae(world: World, flux2_klein_folder: Path) -> None:
    model = make_policy(world, flux2_klein_folder).model
    images = torch.rand(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model.encode_images(images)
        # the pipeline's method, for images in -1..1
        stock = Flux2Pipeline._encode_vae_image(model.pipeline, images * 2 - 1, None)
    torch.testing.assert_close(found, stock, rtol=0, atol=1e-5)
    assert found.shape == (2, 16, 4, 6)


@pytest.mark.parametrize(
    ("family", "lora_rank", "guidance", "dtype"),
    [("flux2", 0, 1.0, "bfloat16"), ("flux2_klein", 4, 3.0, "bfloat16"), ("flux2_klein", 4, 1.0, "float32")],
)
def test_replay_is_exact(
    family: str, lora_rank: int, guidance: float, dtype: str, world: World, request: pytest.FixtureRequest
) -> None:
    policy = make_policy(world, request.getfixturevalue(f"{family}_folder"), lora_rank=lora_rank, dtype=dtype)
    disturb(policy)
    samples = sample(make_rollout(policy, 6, guidance=guidance, sde_window_size=1))
    with torch.no_grad():
        assert torch.equal(policy.replay(samples.trace).log_prob, samples.log_prob)
    assert samples.log_prob is not None and samples.log_prob.std() > 0


SIDE = 78  # root of a reference's area: for samples of 32 x 48, 64 x 96 pixels, the size of the images in `edits`


@pytest.mark.parametrize(("family", "guidance"), [("flux2", 1.0), ("flux2_klein", 3.0)])
def test_edits_are_those_of_the_stock_pipeline(
    family: str, guidance: float, world: World, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(f"{family}_folder")
    policy = make_policy(world, folder, family=f"{family}_edit", reference_size=SIDE)
    rollout = make_rollout(policy, 3, guidance=guidance)
    ours, latents = ode(rollout, edits())
    pipeline, images = load_pipeline(folder), []
    for prompt, noise in zip(edits(), latents, strict=True):
        scale = {"guidance_scale": rollout.sampler.embedded_guidance or guidance}
        if family == "flux2_klein":
            negative = prompt.negative or ""
            scale["negative_prompt_embeds"], _ = pipeline.encode_prompt([negative], max_sequence_length=64)
        made = pipeline(
            prompt.meta["image"].pil(),
            [prompt.text],
            height=32,
            width=48,
            num_inference_steps=4,
            latents=noise[None],
            max_sequence_length=64,
            output_type="pt",
            **scale,
        )
        images.append(made.images)
    torch.testing.assert_close(ours, torch.cat(images), rtol=0, atol=1e-4)
    other = [Prompt(p.text, p.group_id, edits(1)[0].meta, negative=p.negative) for p in edits()]
    assert (ode(rollout, other)[0][1:] - ours[1:]).abs().mean() > 1e-3
    samples = sample(rollout, edits())
    with torch.no_grad():
        assert torch.equal(policy.replay(samples.trace.select(torch.arange(1))).log_prob, samples.log_prob[:1])
    assert policy.model.split_tokens(32, 48, 1, 64) == {"an image of 32 x 48": 24 + 96, "data.max_prompt_length": 64}
    found = policy.embed(edits(1), False, (32, 32))[0]  # cropped to a square, and scaled
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in policy.model.embeds_like(64, 32, 32).items()
    }


def test_layers_that_get_a_lora(world: World, flux2_klein_folder: Path) -> None:
    names = make_policy(world, flux2_klein_folder, lora_rank=2).trained.parameters
    layers: dict[str, set[str]] = {}
    for name in names:
        kind, _, layer = name.split(".", 2)
        layers.setdefault(kind, set()).add(layer.rsplit(".lora_", 1)[0])
    assert layers == {
        "single_transformer_blocks": {"attn.to_qkv_mlp_proj"},
        "transformer_blocks": {
            *("attn." + name for name in ("to_q", "to_k", "to_v", "to_out.0")),
            *("attn." + name for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
            *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
        },
    }
    with refused("rollout.width: 20 should be a multiple of 8, e.g. 16 or 24"):
        make_policy(world, flux2_klein_folder).model.latent_shape(32, 20)
