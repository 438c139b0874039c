"""Wan, and videos in the policy: parity with diffusers' pipeline, exact replays, sizes, arithmetic."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from phalanx.distributed.mesh import World
from phalanx.types import Prompt
from phalanx.zoo.families.wan import Model
from tests.helpers.checks import refused
from tests.helpers.policies import MAX_LENGTH, PROMPTS, disturb, make_policy, make_rollout, ode, sample, velocity
from tests.helpers.tiny import load_pipeline, tiny_wan

VIDEO = 5  # frames: two latent frames


def stock(pipeline: Any, guidance: float, frames: int, latents: Tensor, length: int = MAX_LENGTH) -> Tensor:
    """Videos [3, F, 3, H, W] of diffusers' pipeline, one at a time, because it has one negative prompt per call."""
    videos = [
        pipeline(
            p.text,
            negative_prompt=p.negative,
            height=32,
            width=48,
            num_frames=frames,
            num_inference_steps=4,
            guidance_scale=guidance,
            latents=latent[None],
            max_sequence_length=length,
            output_type="pt",
        ).frames
        for p, latent in zip(PROMPTS, latents, strict=True)
    ]
    return torch.cat(videos)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize("frames", [1, VIDEO, 9])
def test_videos_are_those_of_the_stock_pipeline(world: World, tmp_path: Path, frames: int, guidance: float) -> None:
    folder = tiny_wan(tmp_path / "wan", multistep=False)
    ours, latents = ode(make_rollout(make_policy(world, folder), 3, guidance=guidance, num_frames=frames))
    theirs = stock(load_pipeline(folder), guidance, frames, latents)
    assert theirs.shape == (3, frames, 3, 32, 48) and ours.dtype == torch.float32
    assert ours.std(0).mean() > 0.01  # three different ones
    torch.testing.assert_close(ours, theirs if frames > 1 else theirs[:, 0], rtol=0, atol=1e-4)


def test_levels_are_those_of_the_published_scheduler(world: World, wan_folder: Path) -> None:
    """Its solver at first order without its corrector is an Euler step."""
    from diffusers import UniPCMultistepScheduler

    pipeline = load_pipeline(wan_folder)
    c = pipeline.scheduler.config
    pipeline.scheduler = UniPCMultistepScheduler.from_config(c, solver_order=1, disable_corrector=list(range(4)))
    policy = make_policy(world, wan_folder)
    ours, latents = ode(make_rollout(policy, 3, guidance=4.5, num_frames=VIDEO))
    torch.testing.assert_close(ours, stock(pipeline, 4.5, VIDEO, latents), rtol=0, atol=1e-4)
    sigmas, timesteps = policy.model.schedule(4, 32, 48)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and policy.model.shift(4, 32, 48) == 3
    assert timesteps.tolist() == [999, 900, 750, 500]


def test_timesteps_of_each_token_are_one_a_sample(world: World, tmp_path: Path) -> None:
    """Wan 2.2 TI2V-5B's pipeline and VAE."""
    folder = tiny_wan(tmp_path / "wan", multistep=False, per_token=True)
    policy, pipeline = make_policy(world, folder), load_pipeline(folder)
    assert pipeline.config.expand_timesteps and policy.model.fps == 24
    assert policy.model.latent_shape(32, 48, VIDEO) == (4, 2, 4, 6)
    ours, latents = ode(make_rollout(policy, 3, guidance=4.5, num_frames=VIDEO))
    torch.testing.assert_close(ours, stock(pipeline, 4.5, VIDEO, latents), rtol=0, atol=1e-4)


def test_prompts_are_cut_and_cleaned_as_in_the_stock_pipeline(world: World, wan_folder: Path) -> None:
    policy, pipeline = make_policy(world, wan_folder, max_prompt_length=6), load_pipeline(wan_folder)
    texts = ["  two\n small  dogs", "a &amp; b", "x"]
    expected, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False, max_sequence_length=6)
    prompts = [Prompt(text, i, {}) for i, text in enumerate([*texts, "two small dogs"])]
    assert [len(e["prompt_embeds"]) for e in policy.embed(prompts, negatives=False)] == [6, 6, 3, 6]
    *found, clean = make_rollout(policy, 1).collate(prompts, negatives=False)["prompt_embeds"]
    assert (found[2][3:] == 0).all() and (found[2][2] != 0).any()  # a text of three tokens, and its padding
    torch.testing.assert_close(torch.stack(found), expected, rtol=0, atol=1e-5)
    assert torch.equal(clean, found[0])


def test_padding_is_kept_nowhere_and_comes_back(world: World, wan_folder: Path, tmp_path: Path) -> None:
    """Also if all prompts of a step are short, and if they are read from the disk."""
    pipeline = load_pipeline(wan_folder)
    expected, _ = pipeline.encode_prompt(["x"], do_classifier_free_guidance=False, max_sequence_length=MAX_LENGTH)
    for _ in range(2):
        policy = make_policy(world, wan_folder, embeds_cache_dir=tmp_path)
        found = make_rollout(policy, 1).collate([Prompt("x", 0, {})], negatives=True)["prompt_embeds"]
        assert found.shape == (2, MAX_LENGTH, 64) and (found[1, 1:] == 0).all() and (found[1, 0] != 0).any()
        torch.testing.assert_close(found[:1], expected, rtol=0, atol=1e-5)
    files = sorted(tmp_path.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    assert [load_file(file)["prompt_embeds"].shape for file in files] == [(1, 64), (3, 64)]


def test_other_lengths_of_texts_than_trained_with_are_told(
    world: World, wan_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_policy(world, wan_folder, max_prompt_length=512)
    assert caplog.messages == []
    make_policy(world, wan_folder, max_prompt_length=256)
    assert caplog.messages == [
        "data.max_prompt_length: 256: Wan was trained with texts padded to 512 tokens, and attends to the padding; set "
        "it to 512 (for tasks/sample.py: max_prompt_length)"
    ]


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("model", [{"attn_backend": "native"}, {"dtype": "bfloat16", "gradient_checkpointing": True}])
def test_log_probs_are_exact(
    world: World, wan_folder: Path, model: dict[str, Any], lora_rank: int, guidance: float
) -> None:
    policy = make_policy(world, wan_folder, lora_rank=lora_rank, **model)
    disturb(policy)
    samples = sample(make_rollout(policy, 4, guidance=guidance, num_frames=VIDEO))
    assert samples.outputs.shape == (6, VIDEO, 3, 32, 48)
    assert samples.log_prob is not None and samples.log_prob.shape == (6, 2) and samples.log_prob.std() > 0
    for part in torch.arange(4).split(2):  # the last micro-batch of the rollout is not full
        assert torch.equal(policy.replay(samples.trace.select(part)).log_prob, samples.log_prob[part])


def test_each_video_has_a_noise_of_its_own(world: World, wan_folder: Path) -> None:
    """Noise is a function of the sample's name only: in another batch, a video only differs in the last bits."""
    policy = make_policy(world, wan_folder)
    together, alone = (sample(make_rollout(policy, micro, num_frames=VIDEO)) for micro in (6, 1))
    torch.testing.assert_close(together.outputs, alone.outputs, rtol=0, atol=1e-4)
    assert (together.outputs[0] - together.outputs[1]).abs().max() > 0.05  # of the same prompt
    assert (together.outputs[:, 1] - together.outputs[:, -1]).abs().max() > 0.05  # a frame and a later one


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_of_a_lora_is_the_base_model(world: World, wan_folder: Path, dtype: str) -> None:
    policy = make_policy(world, wan_folder, dtype=dtype, lora_rank=4)
    policy.trained.keep_reference()
    base = velocity(policy)
    disturb(policy)
    assert not torch.equal(velocity(policy), base)
    with policy.using("reference"):
        assert torch.equal(velocity(policy), base)


def test_what_is_computed_in_float32(world: World, wan_folder: Path) -> None:
    """The VAE, with the weights of the file, and the angles of positions: from 30 frames on, bfloat16 could not tell
    neighboring ones apart.
    """
    published = load_file(wan_folder / "vae" / "diffusion_pytorch_model.safetensors")
    for lora_rank in (0, 4):
        model = make_policy(world, wan_folder, dtype="bfloat16", lora_rank=lora_rank).model
        read = model.vae.state_dict()
        assert {p.dtype for p in read.values()} == {torch.float32} and read.keys() == published.keys()
        assert all(torch.equal(read[name], value) for name, value in published.items())
        exact = load_pipeline(wan_folder).transformer.rope
        assert torch.equal(model.transformer.rope.freqs_cos, exact.freqs_cos)
        assert {p.dtype for p in model.text_encoders[0].parameters()} == {torch.bfloat16}


def test_layers_that_get_a_lora(world: World, wan_folder: Path) -> None:
    names = make_policy(world, wan_folder, lora_rank=2).trained.parameters
    assert {name.split(".", 2)[2].rsplit(".lora_", 1)[0] for name in names} == set(Model.lora_targets)
    assert len(names) == 2 * 2 * 8


def test_sizes(world: World, wan_folder: Path) -> None:
    model = make_policy(world, wan_folder).model
    assert model.latent_shape(32, 48, 125) == (4, 32, 8, 12)
    assert model.latent_shape(32, 48) == (4, 1, 8, 12) and model.latent_shape(32, 48, 9) == (4, 3, 8, 12)
    for size, message in (
        ((32, 48, 6), "rollout.num_frames: 6 should be 1 more than a multiple of 4, e.g. 5 or 9"),
        ((32, 48, 3), "rollout.num_frames: 3 should be 1 more than a multiple of 4, e.g. 1 or 5"),
        ((20, 48, 5), "rollout.height: 20 should be a multiple of 8, e.g. 16 or 24"),
        ((32, 264, 5), "rollout.width: 264 is more than the model's 256 pixels"),
        ((32, 48, 129), "rollout.num_frames: 129 is more than the model's 125 frames"),
    ):
        with refused(message):
            model.latent_shape(*size)


def test_the_count_of_flops_is_that_of_the_real_forward_pass(world: World, wan_folder: Path) -> None:
    policy = make_policy(world, wan_folder)
    rollout = make_rollout(policy, 1, num_frames=9)
    embeds, counts = rollout.collate(PROMPTS[:1]), []
    for frames in (1, 9):
        latents = torch.zeros(1, *policy.model.latent_shape(32, 48, frames))
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            policy.velocity(latents, torch.ones(1), embeds, torch.zeros(1, dtype=torch.long), rollout.sampler)
        counts.append(counter.get_total_flops())
        assert policy.model.flops(32, 48, MAX_LENGTH, frames) == counts[-1]
    assert counts[1] > counts[0]


def edited(folder: Path, target: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of a model folder with one changed JSON file."""
    shutil.copytree(folder, target)
    content = json.loads((target / file).read_text())
    change(content)
    (target / file).write_text(json.dumps(content))
    return target


def test_folders_that_are_refused(world: World, wan_folder: Path, sd3_folder: Path, tmp_path: Path) -> None:
    alone = edited(wan_folder, tmp_path / "a14b", "model_index.json", lambda index: index.update(boundary_ratio=0.875))
    scheduler = "scheduler/scheduler_config.json"
    for folder, message in (
        (alone, "should have both a transformer_2 and a boundary_ratio, or neither"),
        (
            edited(wan_folder, tmp_path / "sigmas", scheduler, lambda c: c.update(use_flow_sigmas=False)),
            "should have use_flow_sigmas: true",
        ),
        (
            edited(wan_folder, tmp_path / "shift", scheduler, lambda c: c.update(use_dynamic_shifting=True)),
            "should have use_dynamic_shifting: false",
        ),
    ):
        with pytest.raises(ValueError) as error:
            make_policy(world, folder)
        assert str(error.value).startswith("model.path: ") and str(error.value).endswith(f"'{folder}' {message}")
    other = edited(
        sd3_folder,
        tmp_path / "sd3",
        "model_index.json",
        lambda index: index.update(scheduler=["diffusers", "UniPCMultistepScheduler"]),
    )
    with pytest.raises(ValueError, match="UniPCMultistepScheduler; expected FlowMatchEulerDiscreteScheduler"):
        make_policy(world, other)
