"""LTX-2: parity with diffusers' pipeline, exact replays, sizes, arithmetic, and rejected folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor

from phalanx.config.flow import FlowDataConfig
from phalanx.distributed.mesh import World
from phalanx.models.flow.attention import set_backend
from phalanx.types import Prompt
from tests.helpers.checks import refused
from tests.helpers.policies import MAX_LENGTH, PROMPTS, make_policy, make_rollout, ode
from tests.helpers.tiny import load_pipeline
from tests.helpers.tiny_ltx2 import tiny_ltx2
from tests.numerics.test_wan import edited

VIDEO = 5  # frames: three of the latent
# a text that is truncated, and an empty text
TEXTS = [
    Prompt(" a cat ", 0, {}, negative="blur"),
    Prompt("two small dogs on a red sofa, " * 4, 1, {}),
    Prompt("", 2, {}),
]
PLAIN = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}  # no other than classifier-free guidance


def stock(
    pipeline: Any,
    guidance: float,
    frames: int,
    latents: Tensor,
    prompts: list[Prompt],
    width: int = 96,
    length: int = MAX_LENGTH,
) -> Tensor:
    """Videos [N, F, 3, 32, width] of diffusers' pipeline, one at a time, with the same noise for audio."""
    keys = {"height": 32, "width": width, "num_frames": frames, "num_inference_steps": 4, "output_type": "pt"}
    keys |= PLAIN | {"guidance_scale": guidance, "max_sequence_length": length}
    keys |= dict.fromkeys(("audio_guidance_scale", "audio_stg_scale", "audio_modality_scale"))
    videos, tokens = [], ((frames - 1) // 2 + 1) * 8 * (width // 4)
    for prompt, latent in zip(prompts, latents, strict=True):
        # packed noise, unpacked to the shape that the pipeline expects, which it normalizes like a VAE's output
        video = pipeline._unpack_latents(latent[None, :tokens], (frames - 1) // 2 + 1, 8, width // 4)
        vae = pipeline.vae
        video = pipeline._denormalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        noise = {"latents": video, "audio_latents": latent[None, tokens:]}
        made = pipeline(prompt.text, negative_prompt=prompt.negative, audio_guidance_rescale=None, **noise, **keys)
        videos.append(made.frames)
    return torch.cat(videos)


@pytest.mark.parametrize("guidance", [1.0, 4.5])
@pytest.mark.parametrize(("frames", "prompts"), [(1, PROMPTS), (VIDEO, TEXTS)], ids=["image", "video"])
def test_videos_are_those_of_the_stock_pipeline(
    world: World, ltx2_folder: Path, frames: int, prompts: list[Prompt], guidance: float
) -> None:
    rollout = make_rollout(make_policy(world, ltx2_folder), 3, guidance=guidance, num_frames=frames, width=96)
    videos, latents = ode(rollout, prompts)
    theirs = stock(load_pipeline(ltx2_folder), guidance, frames, latents, prompts)
    assert theirs.shape == (3, frames, 3, 32, 96) and videos.dtype == torch.float32
    assert videos.std(0).mean() > 0.01  # three different ones
    torch.testing.assert_close(videos, theirs if frames > 1 else theirs[:, 0], rtol=0, atol=1e-4)


def test_videos_of_the_first_version(world: World, tmp_path: Path) -> None:
    """LTX-2.0, where the transformer projects the text."""
    folder = tiny_ltx2(tmp_path / "first", newer=False)
    videos, latents = ode(make_rollout(make_policy(world, folder), 3, guidance=3.0, num_frames=VIDEO, width=96), TEXTS)
    torch.testing.assert_close(videos, stock(load_pipeline(folder), 3.0, VIDEO, latents, TEXTS), rtol=0, atol=1e-4)


def test_sound_changes_the_video(world: World, ltx2_folder: Path) -> None:
    """Audio has its own velocity, which the gradient of a video's log-prob includes."""
    model = make_policy(world, ltx2_folder).model
    embeds = model.collate(model.encode(["a cat"], torch.device("cpu"), 32), 32, False)
    shape = model.latent_shape(32, 48, VIDEO)
    tokens = 3 * 96
    assert shape == (tokens + 5, 8)  # 5 / 24 seconds
    latents = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    other = latents.clone()
    other[:, tokens:] = 0
    with torch.no_grad():
        one, two = (model.velocity(x, torch.tensor([500.0]), embeds, 32, 48) for x in (latents, other))
    assert one.shape == latents.shape and (one[:, :tokens] - two[:, :tokens]).abs().max() > 1e-3
    assert torch.equal(model.decode(latents, 32, 48), model.decode(other, 32, 48))


def test_levels_depend_on_the_length_of_a_video(world: World, ltx2_folder: Path) -> None:
    model, levels = make_policy(world, ltx2_folder).model, []
    for frames in (1, 25):
        sigmas, timesteps = model.schedule(4, 64, 64, frames)
        assert sigmas[0] == 1 and sigmas[-1] == 0 and sigmas[-2] == pytest.approx(0.1)  # shift_terminal
        torch.testing.assert_close(timesteps, sigmas[:-1] * 1000)
        levels.append(sigmas)
        assert model.shift(4, 64, 64, frames) > 1
    assert levels[1][1] > levels[0][1] and torch.equal(levels[0], model.schedule(4, 64, 64)[0])


@pytest.mark.parametrize("kind", ["exponential", "linear", "static"])
def test_the_shift_is_that_of_the_schedule(world: World, ltx2_folder: Path, kind: str) -> None:
    """Shifted even levels are those of the schedule before shift_terminal stretches them."""
    model = make_policy(world, ltx2_folder).model
    scheduler = model.pipeline.scheduler
    keys = {"use_dynamic_shifting": False, "shift": 2.5} if kind == "static" else {"time_shift_type": kind}
    model.pipeline.scheduler = type(scheduler).from_config(scheduler.config, shift_terminal=None, **keys)
    even = torch.arange(5, 0, -1) / 5
    s = model.shift(5, 64, 64, 25)
    levels, _ = model.schedule(5, 64, 64, 25)
    torch.testing.assert_close(s * even / (1 + (s - 1) * even), levels[:-1], rtol=1e-5, atol=0)


def test_ranks_that_share_tokens_keep_the_backend(world: World, ltx2_folder: Path) -> None:
    """Their processors replace those that model.attn_backend was set on."""
    model = make_policy(world, ltx2_folder).model
    set_backend(model, "_native_math", world.device)
    model.prepare_sharing(2)
    backends = [processor._attention_backend for processor in model.transformer.attn_processors.values()]
    assert set(backends) == {AttentionBackendName._NATIVE_MATH}


def test_sizes(world: World, ltx2_folder: Path) -> None:
    model = make_policy(world, ltx2_folder).model
    assert model.latent_shape(32, 48) == (97, 8) and model.latent_shape(36, 44, 9) == (5 * 99 + 9, 8)
    assert model.grid(5 * 99 + 9, 36, 44) == (5, 9, 11)
    for size, message in (
        ((32, 48, 6), "rollout.num_frames: 6 should be 1 more than a multiple of 2, e.g. 5 or 7"),
        ((34, 48, 5), "rollout.height: 34 should be a multiple of 4, e.g. 32 or 36"),
    ):
        with refused(message):
            model.latent_shape(*size)
    with refused(
        "data.max_prompt_length: 40 should be a multiple of 16, the number of learned tokens that LTX-2 pads texts "
        "with, e.g. 32 or 48"
    ):
        model.check_length(FlowDataConfig(max_prompt_length=40))


def test_folders_that_are_refused(world: World, ltx2_folder: Path, tmp_path: Path) -> None:
    noisy = tiny_ltx2(tmp_path / "noisy", noise=True)
    with refused(f"model.path: the VAE of '{noisy}' decodes with noise, which is not supported"):
        make_policy(world, noisy)
    key = {"audio_connector_num_learnable_registers": None}
    folder = edited(ltx2_folder, tmp_path / "bare", "connectors/config.json", lambda config: config.update(key))
    with refused(f"model.path: the connectors of '{folder}' should have registers, as many for both"):
        make_policy(world, folder)
