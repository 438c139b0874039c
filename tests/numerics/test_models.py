"""The model families compared with diffusers' pipelines, and their layers."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.config.flow import FlowValRolloutConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed.mesh import World
from phalanx.models.flow.family import FlowModel
from phalanx.models.flow.policy import FlowPolicy
from phalanx.models.lora import add_lora
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.types import Prompt
from tests.helpers.checks import refused
from tests.helpers.policies import MAX_LENGTH, PROMPTS, disturb, make_policy, make_rollout, ode, sample, velocity
from tests.helpers.tiny import load_pipeline, tiny_flux

FAMILIES = ["sd3", "sd3_t5", "qwen", "flux", "z_image", "flux2_klein"]
Folder = Callable[[str], Path]


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Folder:
    return lambda family: request.getfixturevalue(f"{family}_folder")


@pytest.fixture(params=FAMILIES)
def policy(request: pytest.FixtureRequest, world: World, folder: Folder) -> FlowPolicy:
    return make_policy(world, folder(request.param))


def stock_images(pipeline: Any, rollout: PolicyRollout, prompts: list[Prompt], latents: Tensor, length: int) -> Tensor:
    """Images [P, 3, H, W] of diffusers' pipeline, one per prompt."""
    sampler, model = rollout.sampler, rollout.policy.model
    assert isinstance(model, FlowModel)
    off = 0.0 if model.pipeline_class == "ZImagePipeline" else 1.0
    guidance = {model.guidance_key: sampler.guidance if sampler.guided else off}
    if model.embedded_guidance_key is not None:
        guidance[model.embedded_guidance_key] = sampler.embedded_guidance
    given: dict[str, Any] = guidance
    negatives = [model.default_negative if p.negative is None else p.negative for p in prompts]
    if model.pipeline_class == "Flux2KleinPipeline":  # does not take negative prompts as text
        given["negative_prompt_embeds"], _ = pipeline.encode_prompt(negatives, max_sequence_length=length)
    elif model.pipeline_class == "Flux2Pipeline":  # has no negative prompts
        given = {"guidance_scale": sampler.embedded_guidance}
    else:
        given["negative_prompt"] = negatives
    return pipeline(
        prompt=[p.text for p in prompts],
        height=sampler.height,
        width=sampler.width,
        num_inference_steps=sampler.num_inference_steps,
        latents=latents,
        max_sequence_length=length,
        output_type="pt",
        **given,
    ).images


def assert_stock(
    rollout: PolicyRollout, folder: Path, prompts: list[Prompt] = PROMPTS, length: int = MAX_LENGTH
) -> tuple[Tensor, Tensor]:
    """Check that the ODE's images are those of diffusers' pipeline; returns them and their initial latents."""
    ours, latents = ode(rollout, prompts)
    stock = stock_images(load_pipeline(folder), rollout, prompts, latents, length)
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)
    return ours, latents


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_images_are_those_of_the_stock_pipeline(policy: FlowPolicy, guidance: float) -> None:
    ours, _ = assert_stock(make_rollout(policy, 3, guidance=guidance), Path(policy.config.path))
    assert ours.shape == (3, 3, 32, 48) and ours.dtype == torch.float32
    assert ours.std(0).mean() > 0.01  # three different images


@pytest.mark.parametrize("family", ["sd3_t5", "qwen", "flux", "z_image", "flux2_klein"])
def test_prompts_are_cut_where_the_stock_pipeline_cuts_them(world: World, folder: Folder, family: str) -> None:
    rollout = make_rollout(make_policy(world, folder(family), max_prompt_length=6), 3, guidance=3.0)
    ours, latents = assert_stock(rollout, folder(family), length=6)
    longer = stock_images(load_pipeline(folder(family)), rollout, PROMPTS, latents, MAX_LENGTH)
    assert (ours - longer).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("family", ["sd3", "qwen", "flux", "z_image", "flux2_klein"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_transformer_sees_the_timesteps_of_the_stock_pipeline(
    world: World, folder: Folder, family: str, dtype: str
) -> None:
    """Pipelines round timesteps to the model's dtype, each at a different point."""
    rollout = make_rollout(make_policy(world, folder(family), dtype=dtype), 3, num_inference_steps=25)
    pipeline = load_pipeline(folder(family)).to(getattr(torch, dtype))
    seen: list[list[float]] = []
    for transformer in (rollout.policy.model.transformer, pipeline.transformer):
        times = seen.append([]) or seen[-1]
        named = {"z_image": "t_embedder", "flux2_klein": "time_guidance_embed"}
        module = transformer.get_submodule(named.get(family, "time_text_embed"))
        module.register_forward_pre_hook(lambda module, args, times=times: times.append(args[0][0].item()))
    _, latents = ode(rollout, PROMPTS[:1])
    stock_images(pipeline, rollout, PROMPTS[:1], latents, MAX_LENGTH)
    assert len(seen[0]) == 25
    assert seen[0] == pytest.approx(seen[1], rel=1e-5)  # bfloat16 is off by up to 4e-3


def test_one_length_of_prompts_needs_no_mask(world: World, folder: Folder) -> None:
    policy = make_policy(world, folder("qwen"), text_length_multiple=1)
    same = [Prompt("1 2", 0, {}, negative="3 4"), Prompt("5 6", 1, {}, negative="7 8")]
    rollout = make_rollout(policy, 3, guidance=3.0)
    assert set(rollout.collate(same)) == {"prompt_embeds"}
    assert set(rollout.collate(PROMPTS)) == {"prompt_embeds", "prompt_embeds_mask"}
    assert_stock(rollout, folder("qwen"), same)


def test_padding_of_the_text_changes_nothing(world: World, folder: Folder) -> None:
    model = make_policy(world, folder("qwen")).model
    embeds = model.encode(["a cat"], torch.device("cpu"), 32)
    n = len(embeds[0]["prompt_embeds"])
    latents = torch.randn(1, *model.latent_shape(32, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        short, long = (
            model.velocity(latents, torch.tensor([500.0]), model.collate(embeds, length, padded), 32, 48)
            for length, padded in ((n, False), (n + 9, True))
        )
    torch.testing.assert_close(short, long, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen", "z_image"])
def test_steps_of_other_texts_have_one_shape(family: str, world: World, folder: Folder) -> None:
    """Texts are padded to a multiple of tokens, up to the maximum length; images do not change."""
    steps = [PROMPTS[:1], PROMPTS[:2], PROMPTS]
    rounded, exact, bounded = (
        make_policy(world, folder(family), text_length_multiple=multiple, max_prompt_length=most)
        for multiple, most in ((64, 64), (1, 64), (64, 40))
    )

    def lengths(policy: FlowPolicy) -> list[int]:
        rollout = make_rollout(policy, 3, guidance=3.0)
        return [rollout.collate(prompts)["prompt_embeds"].shape[1] for prompts in steps]

    assert lengths(rounded) == [64, 64, 64]
    assert len(set(lengths(exact))) > 1
    assert set(lengths(bounded)) == ({40} if family == "qwen" else {64})  # Z-Image itself pads 40
    disturb(rounded)
    disturb(exact)
    torch.testing.assert_close(*(velocity(policy) for policy in (rounded, exact)), rtol=1e-4, atol=1e-5)
    samples = sample(make_rollout(rounded, 3, guidance=3.0, sde_window_size=1))
    with torch.no_grad():
        assert torch.equal(rounded.replay(samples.trace.select(torch.arange(3))).log_prob, samples.log_prob[:3])


def test_sd3_with_dynamic_shifting_equals_the_stock_pipeline(world: World, folder: Folder, tmp_path: Path) -> None:
    shutil.copytree(folder("sd3"), tmp_path / "model")
    file = tmp_path / "model" / "scheduler" / "scheduler_config.json"
    # lengths of a few tokens, because otherwise the images of this test would not be shifted
    dynamic = {"use_dynamic_shifting": True, "base_image_seq_len": 4, "max_image_seq_len": 64}
    file.write_text(json.dumps(json.loads(file.read_text()) | dynamic))
    assert_stock(make_rollout(make_policy(world, tmp_path / "model"), 3, guidance=3.0), tmp_path / "model")


def test_the_schedule_of_qwen_image_is_shifted_by_size_and_ends_at_the_terminal(world: World, folder: Folder) -> None:
    model = make_policy(world, folder("qwen")).model
    sigmas, timesteps = model.schedule(5, 32, 48)
    assert sigmas.dtype == timesteps.dtype == torch.float32
    assert sigmas[0] == 1 and sigmas[-1] == 0 and len(sigmas) == 6
    assert sigmas[4].item() == pytest.approx(0.02, abs=1e-6)  # shift_terminal
    torch.testing.assert_close(timesteps, sigmas[:-1] * 1000)
    larger, _ = model.schedule(5, 512, 512)
    assert (larger[1:4] > sigmas[1:4]).all()
    # mu by hand: 24 tokens on the line from (256, 0.5) to (8192, 0.9); exp(mu) / (exp(mu) + 1 / t - 1), stretched to 0.02
    mu = torch.tensor(0.5 + (24 - 256) * (0.9 - 0.5) / (8192 - 256), dtype=torch.float64)
    t = torch.tensor([1.0, 0.8, 0.6, 0.4, 0.2], dtype=torch.float64)
    shifted = mu.exp() / (mu.exp() + 1 / t - 1)
    expected = 1 - (1 - shifted) * (1 - 0.02) / (1 - shifted[-1])
    torch.testing.assert_close(sigmas[:-1].double(), expected, rtol=0, atol=1e-6)


def test_the_schedule_of_flux_is_shifted_by_size(world: World, folder: Folder) -> None:
    model = make_policy(world, folder("flux")).model
    sigmas, timesteps = model.schedule(4, 32, 48)
    # mu by hand: 24 tokens on the line from (256, 0.5) to (4096, 1.15), as FLUX.1-dev's; exp(mu) / (exp(mu) + 1 / t - 1)
    mu = torch.tensor(0.5 + (24 - 256) * (1.15 - 0.5) / (4096 - 256), dtype=torch.float64)
    t = torch.tensor([1.0, 0.75, 0.5, 0.25], dtype=torch.float64)
    torch.testing.assert_close(sigmas[:-1].double(), mu.exp() / (mu.exp() + 1 / t - 1), rtol=0, atol=1e-6)
    assert sigmas[-1] == 0
    torch.testing.assert_close(timesteps, sigmas[:-1] * 1000)


@pytest.mark.parametrize("family", ["qwen", "flux", "z_image", "flux2_klein"])
@pytest.mark.parametrize("kind", ["exponential", "linear", "static"])
def test_the_shift_is_that_of_the_schedule(world: World, folder: Folder, family: str, kind: str) -> None:
    """Shifted even levels are those of the schedule before shift_terminal stretches them."""
    model = make_policy(world, folder(family)).model
    scheduler = model.pipeline.scheduler
    assert scheduler.config.use_dynamic_shifting == (family != "z_image")
    keys = {"use_dynamic_shifting": False, "shift": 2.5} if kind == "static" else {"time_shift_type": kind}
    model.pipeline.scheduler = type(scheduler).from_config(scheduler.config, shift_terminal=None, **keys)
    even = torch.arange(5, 0, -1) / 5
    found = set()
    for size in ((32, 48), (256, 256)):
        s = model.shift(5, *size)
        torch.testing.assert_close(s * even / (1 + (s - 1) * even), model.schedule(5, *size)[0][:-1], rtol=1e-5, atol=0)
        found.add(s)
    assert len(found) == (1 if kind == "static" or family == "z_image" else 2)


def test_the_shift_of_sd3(world: World, folder: Folder) -> None:
    """The scheduler's shift, or mu by hand: 24 tokens on the line from (256, 0.5) to (4096, 1.15)."""
    model = make_policy(world, folder("sd3")).model
    assert model.shift(4, 32, 48) == 3.0
    config = model.pipeline.scheduler.config
    model.pipeline.scheduler = type(model.pipeline.scheduler).from_config(config, use_dynamic_shifting=True)
    assert model.shift(4, 32, 48) == pytest.approx(math.exp(0.5 + (24 - 256) * (1.15 - 0.5) / (4096 - 256)))


def test_guidance_of_qwen_image_keeps_the_length_of_each_token(world: World, folder: Folder) -> None:
    model = make_policy(world, folder("qwen")).model
    negative, positive = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[0.0, 1.0], [0.0, 3.0]]])
    # n + 2 (p - n) = [-1, 2], [0, 4]; the norms of p are 1 and 3
    expected = torch.tensor([[[-1 / 5**0.5, 2 / 5**0.5], [0.0, 3.0]]])
    torch.testing.assert_close(model.guide(negative, positive, 2.0), expected)


@torch.no_grad()
def test_flux_takes_guidance_as_an_input(world: World, folder: Folder) -> None:
    policy = make_policy(world, folder("flux"))
    plain, guided = (make_rollout(policy, 3, guidance_scale=g) for g in (1.0, 3.5))
    assert not guided.sampler.guided  # one branch
    embeds, rows = guided.collate(PROMPTS, negatives=False), torch.arange(3)
    assert embeds["prompt_embeds"].shape[0] == 3 and set(embeds) == {"prompt_embeds", "pooled"}
    x = torch.randn(3, *policy.model.latent_shape(32, 48), generator=torch.Generator().manual_seed(0))
    seen = []
    handle = policy.model.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["guidance"].tolist()), with_kwargs=True
    )
    one, other = (policy.velocity(x, torch.ones(3), embeds, rows, r.sampler) for r in (plain, guided))
    handle.remove()
    assert seen == [[1.0] * 3, [3.5] * 3]
    assert (one - other).abs().max() > 1e-3
    validation = make_rollout(policy, 3, guidance_scale=3.5, val=FlowValRolloutConfig(guidance_scale=2.0)).val_sampler
    assert validation.embedded_guidance == 2.0 and validation.guidance == 1.0


def test_flux_schnell_has_no_guidance_of_its_own(world: World, tmp_path: Path) -> None:
    policy = make_policy(world, tiny_flux(tmp_path, guidance_embeds=False))
    rollout = make_rollout(policy, 3)
    assert rollout.sampler.embedded_guidance is None
    assert_stock(rollout, tmp_path)
    assert rollout.schedule(rollout.sampler).levels == [1.0, 0.75, 0.5, 0.25, 0.0]  # not shifted
    assert policy.model.flops(32, 48, 32) > 0
    with refused("rollout.guidance_scale: 3.5 has no effect on this model; its guidance is rollout.true_cfg_scale"):
        make_rollout(policy, 3, guidance_scale=3.5)


def test_guidance_of_z_image_counts_from_the_positive_branch(world: World, folder: Folder) -> None:
    model = make_policy(world, folder("z_image")).model
    assert model.guide(torch.tensor([1.0]), torch.tensor([3.0]), 4.5).tolist() == [12.0]


@torch.no_grad()
def test_texts_of_z_image_are_filled_up(world: World, folder: Folder) -> None:
    """Other texts in the batch do not matter; texts of up to 32 tokens, which the model pads itself, need no mask."""
    policy = make_policy(world, folder("z_image"))
    rollout = make_rollout(policy, 3)
    short, longer = [Prompt("x", 0, {}), Prompt("a cat", 1, {})], [Prompt("two small dogs on a red sofa", 2, {})]
    alone, beside = (rollout.collate(p, negatives=False) for p in (short, short + longer))
    assert set(alone) == {"prompt_embeds", "text_mask"} and alone["prompt_embeds"].shape == (2, 32, 32)
    assert alone["text_mask"].sum(1).tolist() == [19, 23]
    assert beside["prompt_embeds"].shape == (3, 64, 32) and beside["text_mask"].sum(1).tolist() == [19, 23, 46]
    assert beside["attention_mask"].sum(1).tolist() == [32, 32, 64]
    x, t = torch.randn(3, *policy.model.latent_shape(32, 48), generator=torch.Generator().manual_seed(0)), torch.ones(3)
    one = policy.model.velocity(x[:2], 500 * t[:2], alone, 32, 48)
    torch.testing.assert_close(policy.model.velocity(x, 500 * t, beside, 32, 48)[:2], one, rtol=0, atol=1e-5)


def test_prompts_longer_than_z_image_takes(world: World, folder: Folder) -> None:
    """They are refused before anything is encoded; 96 tokens have positions."""
    with refused("data.max_prompt_length: 97 is more than the model's 96 tokens"):
        make_policy(world, folder("z_image"), max_prompt_length=97)
    longest = make_policy(world, folder("z_image"), max_prompt_length=96)
    rollout = make_rollout(longest, 1)
    embeds = rollout.collate([Prompt("x" * 96, 0, {})], negatives=False)
    assert embeds["text_mask"].shape == (1, 96) and embeds["text_mask"].all()
    latents = torch.zeros(1, *longest.model.latent_shape(32, 48))
    assert longest.model.velocity(latents, torch.ones(1), embeds, 32, 48).isfinite().all()


def test_guidance_of_sd3(world: World, folder: Folder) -> None:
    model = make_policy(world, folder("sd3")).model
    assert model.guide(torch.tensor([1.0]), torch.tensor([3.0]), 4.5).tolist() == [10.0]


def test_sizes_that_the_model_cannot_make(world: World, folder: Folder) -> None:
    families = ("qwen", "sd3", "flux", "z_image")
    qwen, sd3, flux, z_image = (make_policy(world, folder(family)).model for family in families)
    assert z_image.latent_shape(32, 48) == (4, 8, 12)
    assert flux.latent_shape(32, 48) == (24, 16)
    assert qwen.latent_shape(32, 48) == (24, 16)
    assert sd3.latent_shape(32, 48) == (4, 8, 12)
    for call, message in (
        (lambda: qwen.latent_shape(36, 48), "rollout.height: 36 should be a multiple of 8, e.g. 32 or 40"),
        (lambda: qwen.latent_shape(32, 3), "rollout.width: 3 should be a multiple of 8, e.g. 8 or 16"),
        (lambda: flux.latent_shape(32, 20), "rollout.width: 20 should be a multiple of 8, e.g. 16 or 24"),
        (lambda: z_image.latent_shape(32, 20), "rollout.width: 20 should be a multiple of 8, e.g. 16 or 24"),
        (lambda: z_image.latent_shape(264, 32), "rollout.height: 264 is more than the model's 256 pixels"),
        (lambda: sd3.latent_shape(32, 47), "rollout.width: 47 should be a multiple of 8, e.g. 40 or 48"),
        (lambda: sd3.latent_shape(136, 48), "rollout.height: 136 is more than the model's 128 pixels"),
    ):
        with refused(message):
            call()


@pytest.mark.parametrize("policy", [*FAMILIES, "wan"], indirect=True)
def test_decode_undoes_encode_images(policy: FlowPolicy) -> None:
    """Except for the VAE's error, as its weights are random here."""
    model, generator = policy.model, torch.Generator().manual_seed(0)
    images = torch.rand(2, 3, 32, 48, generator=generator)
    with torch.no_grad():
        latents = model.encode_images(images)
        assert latents.shape == (2, *model.latent_shape(32, 48)) and latents.dtype == torch.float32
        video = model.pipeline_class in ("QwenImagePipeline", "WanPipeline")  # the VAE has frames
        pixels = (images * 2 - 1)[:, :, None] if video else images * 2 - 1
        posterior = model.vae.encode(pixels).latent_dist
        plain = model.vae.decode(posterior.mode()).sample
        expected = ((plain[:, :, 0] if video else plain) / 2 + 0.5).clamp(0, 1)
        torch.testing.assert_close(model.decode(latents, 32, 48), expected, rtol=0, atol=1e-5)
        drawn = [model.encode_images(images, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_images_are_decoded_in_slices(policy: FlowPolicy) -> None:
    rollout = make_rollout(policy, 3)
    shape = policy.model.latent_shape(32, 48)
    latents = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    seen = []
    handle = policy.model.vae.decoder.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    slices, whole = (policy.decode(latents, rollout.sampler, n) for n in (2, None))
    handle.remove()
    assert seen == [2, 1, 3]
    torch.testing.assert_close(slices, whole, rtol=0, atol=1e-5)


def test_the_count_of_flops_is_that_of_the_real_forward_pass(policy: FlowPolicy) -> None:
    rollout = make_rollout(policy, 1)
    embeds = rollout.collate(PROMPTS[:1])
    latents = torch.zeros(1, *policy.model.latent_shape(32, 48))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        policy.velocity(latents, torch.ones(1), embeds, torch.zeros(1, dtype=torch.long), rollout.sampler)
    assert policy.model.flops(32, 48, embeds["prompt_embeds"].shape[1]) == counter.get_total_flops()


def test_layers_that_get_a_lora(world: World, folder: Folder) -> None:
    names = make_policy(world, folder("qwen"), lora_rank=2).trained.parameters
    layers = {name.split(".", 2)[2].rsplit(".lora_", 1)[0] for name in names}
    assert layers == {
        *("attn." + name for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *("attn." + name for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    }
    assert len(names) == 2 * 2 * len(layers)
    names = make_policy(world, folder("flux"), lora_rank=2).trained.parameters
    attention = {"attn." + name for name in ("to_q", "to_k", "to_v")}
    assert {name.split(".", 2)[2].rsplit(".lora_", 1)[0] for name in names if name.startswith("single_")} == attention
    assert {name.split(".", 2)[2].rsplit(".lora_", 1)[0] for name in names if name.startswith("transformer_")} == {
        *attention,
        *("attn." + name for name in ("to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    }
    assert len(names) == 2 * 2 * (3 + 12)
    names = make_policy(world, folder("z_image"), lora_rank=2).trained.parameters
    assert {name.split(".", 2)[2].rsplit(".lora_", 1)[0] for name in names} == {
        *("attention." + name for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *("feed_forward." + name for name in ("w1", "w2", "w3")),
    }
    assert {name.split(".")[0] for name in names} == {"noise_refiner", "context_refiner", "layers"}
    with pytest.raises(ValueError, match=r"in a block: adaLN_modulation.0, attention.to_k, .*, feed_forward.w3$"):
        make_policy(world, folder("z_image"), lora_rank=2, target_modules=["attn.to_q"])
    modulation = make_policy(
        world, folder("qwen"), lora_rank=2, target_modules=["img_mod.1", "txt_mod.1"]
    ).trained.parameters
    assert len(modulation) == 2 * 2 * 2
    with refused(
        "model.target_modules: no linear layer ends in 'attn.q'; in a block: attn.add_k_proj, attn.add_q_proj, "
        "attn.add_v_proj, attn.to_add_out, attn.to_k, attn.to_out.0, attn.to_q, attn.to_v, img_mlp.net.0.proj, "
        "img_mlp.net.2, img_mod.1, txt_mlp.net.0.proj, txt_mlp.net.2, txt_mod.1"
    ):
        make_policy(world, folder("qwen"), lora_rank=2, target_modules=["attn.q"])


def test_a_model_may_lack_some_of_its_familys_layers() -> None:
    """An SD3 with one block lacks some default targets; a layer that the user names must exist."""
    module = nn.ModuleDict({"to_q": nn.Linear(4, 4)})
    config = FlowModelConfig(path="none", lora_rank=2)
    add_lora(module, config, ("to_q", "to_add_out"), seed=0)
    assert {name for name, p in module.named_parameters() if p.requires_grad} == {
        "to_q.lora_A.default.weight",
        "to_q.lora_B.default.weight",
    }
    config.target_modules = []
    with refused("model.target_modules: [] names no layer; null takes the default"):
        add_lora(nn.ModuleDict({"to_q": nn.Linear(4, 4)}), config, ("to_q",), seed=0)
    config.target_modules = ["to_add_out"]
    with refused("model.target_modules: no linear layer ends in 'to_add_out'; in a block: none"):
        add_lora(nn.ModuleDict({"to_q": nn.Linear(4, 4)}), config, ("to_q",), seed=0)


def test_the_text_encoder_computes_in_the_dtype_of_the_model(world: World, folder: Folder) -> None:
    for family in ("sd3_t5", "qwen", "flux", "z_image"):
        policy = make_policy(world, folder(family), dtype="bfloat16")
        for module in (policy.model.vae, *policy.model.text_encoders):
            assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        assert policy.embed(PROMPTS)[0]["prompt_embeds"].dtype == torch.bfloat16
        # full fine-tuning: the optimizer's weights are float32
        assert {p.dtype for p in policy.trained.parameters.values()} == {torch.float32}
        assert {p.dtype for p in policy.model.transformer.parameters()} == {torch.bfloat16}
