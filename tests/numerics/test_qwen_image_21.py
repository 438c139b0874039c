"""Qwen-Image 2.1: parity with diffusers' pipeline, exact replays, training, exports, arithmetic."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.config.tasks import ExportConfig
from phalanx.distributed.mesh import World
from phalanx.distributed.seed import fold_in, normal
from phalanx.run.rules import load_config
from phalanx.tools.export import Export
from phalanx.types import Prompt
from phalanx.zoo.families.qwen_image_21 import TEMPLATE_TOKENS, Model
from tests.distributed.test_layouts import assert_same_step
from tests.distributed.test_videos import train
from tests.helpers.checks import refused
from tests.helpers.jobs import PROMPTS as TEXTS
from tests.helpers.jobs import algorithm_config, one_step, tiny_config
from tests.helpers.policies import MAX_LENGTH, PROMPTS, disturb, make_policy, make_rollout, ode, sample
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_qwen_image_21 import load_21_pipeline

SIZE = {"height": 64, "width": 96}
ODD = [*PROMPTS[:2], Prompt("", 2, {}, negative="grey, flat")]


def stock(pipeline: Any, guidance: float, latents: Tensor, prompts: list[Prompt], size: dict[str, int]) -> Tensor:
    """Images [P, 3, H, W] of diffusers' pipeline over white, one at a time, because its positions depend on the batch."""
    images = []
    for prompt, latent in zip(prompts, latents, strict=True):
        negative = (" " if prompt.negative is None else prompt.negative) if guidance > 1 else None
        keys = {"true_cfg_scale": guidance, "num_inference_steps": 4, "output_type": "pt", **size}
        images.append(pipeline(prompt.text, negative_prompt=negative, latents=latent[None], **keys).images)
    whole = torch.cat(images)
    assert whole.shape[1] == 4 and whole[:, 3].std() > 0
    return whole[:, :3] * whole[:, 3:] + 1 - whole[:, 3:]


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("prompts", [PROMPTS, ODD], ids=["texts", "empty"])
def test_images_are_those_of_the_stock_pipeline(
    world: World, qwen_21_folder: Path, prompts: list[Prompt], guidance: float
) -> None:
    images, latents = ode(make_rollout(make_policy(world, qwen_21_folder), 3, guidance=guidance, **SIZE), prompts)
    theirs = stock(load_21_pipeline(qwen_21_folder), guidance, latents, prompts, SIZE)
    assert images.std(0).mean() > 0.01  # three different ones
    torch.testing.assert_close(images, theirs, rtol=0, atol=1e-4)


def test_without_a_level_of_its_own_for_texts(world: World, qwen_21_folder: Path) -> None:
    policy, pipeline = make_policy(world, qwen_21_folder), load_21_pipeline(qwen_21_folder)
    for transformer in (policy.model.transformer, pipeline.transformer):
        transformer.register_to_config(causal_condition=False)
    images, latents = ode(make_rollout(policy, 3, **SIZE))
    torch.testing.assert_close(images, stock(pipeline, 1.0, latents, PROMPTS, SIZE), rtol=0, atol=1e-4)


def test_prompts_are_cut(world: World, qwen_21_folder: Path) -> None:
    model = make_policy(world, qwen_21_folder).model
    one, other = model.encode(["abcdef", "abcxyz"], torch.device("cpu"), 3)
    assert torch.equal(one["prompt_embeds"], other["prompt_embeds"])
    assert len(one["prompt_embeds"]) <= model.most_tokens(3, 64, 96) + 16  # the tiny tokenizer has few words
    assert model.most_tokens(3, 64, 96) == 3 + TEMPLATE_TOKENS


def test_padding_of_the_text_changes_nothing(world: World, qwen_21_folder: Path) -> None:
    model = make_policy(world, qwen_21_folder).model
    embeds = model.encode(["a cat"], torch.device("cpu"), 32)
    n = len(embeds[0]["prompt_embeds"])
    latents = torch.randn(1, *model.latent_shape(64, 96), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        short, long = (
            model.velocity(latents, torch.tensor([500.0]), model.collate(embeds, length, padded), 64, 96)
            for length, padded in ((n, False), (n + 9, True))
        )
    torch.testing.assert_close(short, long, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "model", [{"lora_rank": 4, "attn_backend": "native"}, {"dtype": "bfloat16", "gradient_checkpointing": True}]
)
def test_log_probs_are_exact(world: World, qwen_21_folder: Path, model: dict[str, Any]) -> None:
    policy = make_policy(world, qwen_21_folder, **model)
    disturb(policy)
    samples = sample(make_rollout(policy, 4, guidance=3.0, **SIZE), ODD)
    assert samples.outputs.shape == (6, 3, 64, 96)
    assert samples.log_prob is not None and samples.log_prob.std() > 0
    for part in torch.arange(4).split(2):
        assert torch.equal(policy.replay(samples.trace.select(part)).log_prob, samples.log_prob[part])


def test_layers_that_get_a_lora(world: World, qwen_21_folder: Path) -> None:
    names = make_policy(world, qwen_21_folder, lora_rank=2).trained.parameters
    assert {name.split(".", 2)[2].rsplit(".lora_", 1)[0] for name in names} == set(Model.lora_targets)


def test_images_are_encoded_as_opaque_ones(world: World, qwen_21_folder: Path) -> None:
    model = make_policy(world, qwen_21_folder).model
    images = torch.rand(2, 3, 64, 96)
    latents = model.encode_images(images)
    assert latents.shape == (2, *model.latent_shape(64, 96))
    whole = torch.cat([images, torch.ones(2, 1, 64, 96)], 1)[:, :, None] * 2 - 1
    pipeline = load_21_pipeline(qwen_21_folder)
    theirs = pipeline._pack_latents(pipeline._encode_vae_image(whole, None), 2, 4, 4, 6)
    torch.testing.assert_close(latents, theirs, rtol=0, atol=1e-5)


def test_sizes_and_levels(world: World, qwen_21_folder: Path) -> None:
    model = make_policy(world, qwen_21_folder).model
    assert model.latent_shape(64, 96) == (24, 4)
    with refused("rollout.height: 48 should be a multiple of 32, e.g. 32 or 64"):
        model.latent_shape(48, 64)
    sigmas, timesteps = model.schedule(5, 64, 96)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and sigmas[4].item() == pytest.approx(0.02, abs=1e-6)
    torch.testing.assert_close(timesteps, sigmas[:-1] * 1000)


def test_the_count_of_flops_is_that_of_the_real_forward_pass(world: World, qwen_21_folder: Path) -> None:
    policy = make_policy(world, qwen_21_folder)
    rollout = make_rollout(policy, 1, **SIZE)
    embeds = rollout.collate(PROMPTS[:1])
    latents = torch.zeros(1, *policy.model.latent_shape(64, 96))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        policy.velocity(latents, torch.ones(1), embeds, torch.zeros(1, dtype=torch.long), rollout.sampler)
    assert policy.model.flops(64, 96, embeds["prompt_embeds"].shape[1]) == counter.get_total_flops()


@pytest.mark.full
@pytest.mark.parametrize("name", ["flowgrpo", "diffusion_nft"])
def test_layouts_agree(name: str, qwen_21_folder: Path, tmp_path: Path) -> None:
    keys = ("model.lora_rank=4", "algorithm.kl_loss_coef=0.01", "rollout.micro_batch_size_per_gpu=4")
    make = tiny_config if name == "flowgrpo" else lambda *args: algorithm_config(*args[:2], name, *args[2:])
    cfg = make(qwen_21_folder, tmp_path, *keys)
    one = run_ranks(one_step, 1, cfg)
    assert one[0]["row"]["actor/updates_skipped"] == 0 and one[0]["row"]["actor/grad_norm"] > 0
    cfg.parallel = replace(cfg.parallel, fsdp_size=2)
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.full)])
def test_the_export_is_read_by_stock_diffusers(kind: str, qwen_21_folder: Path, tmp_path: Path) -> None:
    keys = ["model.lora_rank=4", "optim.lr=3e-2"] if kind == "lora" else ["optim.lr=1e-2"]
    [images] = run_ranks(train, 1, tiny_config(qwen_21_folder, tmp_path, *keys, "trainer.save_freq=2"), timeout=150)
    exported = tmp_path / "export"
    Export(load_config(ExportConfig, None, [f"checkpoint={tmp_path / 'out'}", f"output_dir={exported}"])).run()
    shape = (4, 4)
    noise = [normal(shape, fold_in(1234, 0, i, 0, "init"), torch.device("cpu")) for i in range(2)]
    prompts = [Prompt(text, i, {}) for i, text in enumerate(TEXTS[:2])]
    case = 3.0, torch.stack(noise), prompts, {"height": 32, "width": 32}
    pipeline = load_21_pipeline(qwen_21_folder)
    assert (stock(pipeline, *case) - images).abs().max() > 0.02
    if kind == "lora":
        pipeline.load_lora_weights(exported)
    else:
        pipeline = load_21_pipeline(exported)
    torch.testing.assert_close(stock(pipeline, *case), images, rtol=0, atol=1e-4)


def test_texts_longer_than_the_limit_are_counted_as_they_are_cut(world: World, qwen_21_folder: Path) -> None:
    model = make_policy(world, qwen_21_folder).model
    _, tokens, limit = model.text_tokens(["x" * MAX_LENGTH, "x" * (MAX_LENGTH + 1)], MAX_LENGTH)
    assert [len(ids) > limit for ids in tokens] == [False, True]
