"""Wan 2.2 A14B, with one transformer for noise levels above a boundary and one for those below."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy
from phalanx.run.flow_components import keep_last_steps
from phalanx.zoo.families.wan import Experts
from tests.helpers.checks import refused
from tests.helpers.policies import MAX_LENGTH, PROMPTS, disturb, make_policy, make_rollout, ode, sample, velocity
from tests.helpers.tiny import load_pipeline
from tests.helpers.tiny_i2v import tiny_wan_a14b

VIDEO = 5
# the trained ones of four steps at shift 3: two are above the boundary of 800, and one is not
ALL = {"sde_window_size": None}


def stock(pipeline: Any, scales: tuple[float, float | None], latents: Tensor, size: tuple[int, int]) -> Tensor:
    videos = [
        pipeline(
            p.text,
            negative_prompt=p.negative,
            height=size[0],
            width=size[1],
            num_frames=VIDEO,
            num_inference_steps=4,
            guidance_scale=scales[0],
            guidance_scale_2=scales[1],
            latents=latent[None],
            max_sequence_length=MAX_LENGTH,
            output_type="pt",
        ).frames
        for p, latent in zip(PROMPTS, latents, strict=True)
    ]
    return torch.cat(videos)


@pytest.mark.parametrize(("scales", "size"), [((1.0, None), (32, 48)), ((4.0, 3.0), (40, 56)), ((3.0, None), (32, 48))])
def test_videos_are_those_of_the_stock_pipeline(
    world: World, a14b_folder: Path, scales: tuple[float, float | None], size: tuple[int, int]
) -> None:
    policy = make_policy(world, a14b_folder)
    keys = {"guidance_scale_2": scales[1], "height": size[0], "width": size[1]}
    rollout = make_rollout(policy, 3, guidance=scales[0], num_frames=VIDEO, **keys)
    assert rollout.schedule(rollout.sampler).timesteps.tolist() == pytest.approx(
        [1000.0, 857.69, 602.15, 8.93], abs=0.01
    )
    ours, latents = ode(rollout)
    # the stock pipeline requires multiples of 16, although its transformer supports those of 8
    pipeline = load_pipeline(a14b_folder)
    pipeline.check_inputs = lambda *args, **keys: None
    torch.testing.assert_close(ours, stock(pipeline, scales, latents, size), rtol=0, atol=1e-4)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("model", [{"lora_rank": 4}, {"dtype": "bfloat16", "gradient_checkpointing": True}])
def test_log_probs_are_exact_on_both_sides_of_the_boundary(
    world: World, a14b_folder: Path, model: dict[str, Any], guidance: float
) -> None:
    policy = make_policy(world, a14b_folder, **model)
    disturb(policy)
    second = 2.0 if guidance > 1 else None
    samples = sample(make_rollout(policy, 6, guidance=guidance, guidance_scale_2=second, num_frames=VIDEO, **ALL))
    assert samples.log_prob is not None and samples.log_prob.shape == (6, 3)
    for part in torch.arange(6).split(2):
        assert torch.equal(policy.replay(samples.trace.select(part)).log_prob, samples.log_prob[part])


def experts(policy: FlowPolicy) -> Experts:
    found = policy.model.transformer
    assert isinstance(found, Experts)
    return found


def gradients(policy: FlowPolicy, timesteps: list[float], whole: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """The velocity of rows at timesteps, and the gradients of its sum of squares."""
    rollout = make_rollout(policy, 3, guidance=1.0)
    embeds = rollout.collate(PROMPTS, negatives=False)
    shape = (3, *policy.model.latent_shape(32, 48))
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    experts(policy).whole = whole
    out = policy.velocity(latents, torch.tensor(timesteps), embeds, torch.arange(3), rollout.sampler)
    for p in policy.trained.parameters.values():
        p.grad = None
    out.square().sum().backward()
    grads = {name: p.grad for name, p in policy.trained.parameters.items() if p.grad is not None}
    return out.detach(), grads


@pytest.mark.parametrize("whole", [False, True])
def test_each_row_is_computed_by_the_transformer_of_its_level(world: World, a14b_folder: Path, whole: bool) -> None:
    policy = make_policy(world, a14b_folder)
    levels = [500.0, 900.0, 100.0]
    mixed, grads = gradients(policy, levels, whole)
    parts = [gradients(policy, [level] * 3) for level in levels]
    for i, (alone, _) in enumerate(parts):
        torch.testing.assert_close(mixed[i], alone[i], rtol=0, atol=1e-5)
    assert {name.split(".")[0] for name in parts[1][1]} == {"transformer"}  # for a pass above the boundary
    assert {name.split(".")[0] for name in parts[0][1]} == {"transformer_2"}
    assert {name.split(".")[0] for name in grads} == {"transformer", "transformer_2"}


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("chosen", ["transformer", "transformer_2"])
def test_one_of_the_two_is_trained(world: World, a14b_folder: Path, chosen: str, lora_rank: int) -> None:
    policy = make_policy(world, a14b_folder, target_components=[chosen], lora_rank=lora_rank)
    assert {name.split(".")[0] for name in policy.trained.parameters} == {chosen}
    disturb(policy)
    other = 500.0 if chosen == "transformer" else 900.0
    _, grads = gradients(policy, [other] * 3)  # the backward pass runs, but nothing is learned
    assert grads and all((grad == 0).all() for grad in grads.values())


def test_the_reference_of_two_loras_is_the_base_model(world: World, a14b_folder: Path) -> None:
    policy = make_policy(world, a14b_folder, lora_rank=4)
    policy.trained.keep_reference()
    with torch.no_grad():
        base = velocity(policy)  # at levels on both sides
        disturb(policy)
        moved = velocity(policy)
        assert ((moved - base).flatten(1).abs().max(1).values > 0).all()
        with policy.using("reference"):
            assert torch.equal(velocity(policy), base)


def test_half_of_each_is_recomputed(world: World, a14b_folder: Path) -> None:
    blocks = make_policy(world, a14b_folder).model.blocks()
    model = make_policy(world, a14b_folder).model
    names = {id(block): name for name, block in model.transformer.named_modules()}
    order = ["transformer.blocks.0", "transformer_2.blocks.0", "transformer.blocks.1", "transformer_2.blocks.1"]
    assert [names[id(block)] for block in model.blocks()] == order and len(blocks) == 4


def test_a_transformer_that_learns_nothing_is_told(
    world: World, a14b_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_policy(world, a14b_folder, max_prompt_length=512)
    make_rollout(policy, 1, num_frames=VIDEO)
    assert caplog.messages == []
    make_rollout(policy, 1, num_frames=VIDEO, sde_window_range=[0, 2])
    assert caplog.messages == [
        "model.target_components: no step of rollout.sde_window_range, or of algorithm.last_steps, is one of "
        "transformer_2, so it learns nothing; its steps are those whose timestep is below 800"
    ]
    caplog.clear()
    rollout = make_rollout(policy, 1, num_frames=VIDEO)
    rollout.window = False
    keep_last_steps(policy, rollout, 3, policy.config)
    assert caplog.messages == []
    keep_last_steps(policy, rollout, 1, policy.config)
    assert "is one of transformer, so it learns nothing; its steps are those whose timestep is at" in caplog.text
    caplog.clear()
    chosen = make_policy(world, a14b_folder, max_prompt_length=512, target_components=["transformer"])
    make_rollout(chosen, 1, num_frames=VIDEO, sde_window_range=[0, 2])
    assert caplog.messages == []


def test_folders_and_keys_that_are_refused(world: World, a14b_folder: Path, wan_folder: Path, tmp_path: Path) -> None:
    with refused("rollout.guidance_scale_2: 3 needs a model with two transformers; this one has one"):
        make_rollout(make_policy(world, wan_folder), 1, guidance=4.0, guidance_scale_2=3.0)
    with refused(
        "rollout.guidance_scale_2: 3 has no effect where rollout.guidance_scale is not above 1, as in diffusers"
    ):
        make_rollout(make_policy(world, a14b_folder), 1, guidance_scale_2=3.0)
    with refused("model.target_components: ['transformer_2']; the transformers of this model: transformer"):
        make_policy(world, wan_folder, target_components=["transformer_2"])
    with refused("model.target_components: ['vae']; the transformers of this model: transformer, transformer_2"):
        make_policy(world, a14b_folder, target_components=["vae"])
    one = tiny_wan_a14b(tmp_path / "one")
    for file in (one / "transformer_2").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"model.path: .*/one/transformer_2"):
        make_policy(world, one)
