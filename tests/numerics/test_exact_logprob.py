"""Rollout and replay give bit-equal log-probabilities, so the ratios of the first update are exactly 1."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.algorithms.flow_grpo import Algorithm, Config
from phalanx.config.flow import FlowDataConfig, FlowRolloutConfig
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy, build_policy
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.run.world import start_world
from phalanx.types import Batch, Samples
from tests.helpers.checks import reduced
from tests.helpers.policies import MAX_LENGTH, PROMPTS, disturb, make_policy, make_rollout, sample
from tests.helpers.ranks import run_ranks

MICRO = 3  # samples per replay
N = 4  # images per prompt, of 3 prompts: two rollout micro-batches of MICRO x window


@pytest.fixture(params=["sd3", "qwen", "flux", "z_image"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


def micro_batches(samples: Samples) -> list[Tensor]:
    """Micro-batches in another order than that of sampling, as in an update."""
    order = torch.randperm(len(samples.index), generator=torch.Generator().manual_seed(3))
    return list(order.split(MICRO))


def make_batch(samples: Samples, part: Tensor, ref_mean: Tensor | None = None) -> Batch:
    assert samples.log_prob is not None
    return Batch(
        trace=samples.trace.select(part),
        log_prob=samples.log_prob[part],
        mask=samples.mask[part],
        advantage=torch.tensor([1.5, -0.5, 0.25]),
        weight=torch.ones(MICRO, samples.log_prob.shape[1]),
        reference_outputs={} if ref_mean is None else {"reference": ref_mean},
    )


def assert_exact(policy: FlowPolicy, samples: Samples, window: int = 2) -> None:
    rule = Algorithm(Config())
    assert samples.log_prob is not None and samples.log_prob.shape == (len(PROMPTS) * N, window)
    assert samples.log_prob.isfinite().all() and samples.log_prob.std() > 0
    for part in micro_batches(samples):
        replay = policy.replay(samples.trace.select(part))
        assert torch.equal(replay.log_prob, samples.log_prob[part])
        batch = make_batch(samples, part)
        loss, metrics = rule.loss(policy, batch)
        stats = reduced(metrics, batch.weight)
        assert stats["ratio_mean"] == 1 and stats["ratio_std"] == 0 and stats["first_ratio_error"] == 0
        assert stats["clipfrac"] == 0 and stats["approx_kl"] == 0
        assert torch.equal(loss, torch.tensor([-1.5, 0.5, -0.25])[:, None].expand(-1, window))
        assert loss.requires_grad


def make_samples(policy: FlowPolicy, *, window: int | None = 2, guidance: float = 3.0, **rollout: Any) -> Samples:
    size = 3 if window is None else window
    return sample(make_rollout(policy, MICRO * size, guidance=guidance, n=N, sde_window_size=window, **rollout))


@pytest.mark.quick(
    "sd3-0-cps-1.0",
    "sd3-4-sde-3.0",
    "qwen-0-dance_sde-1.0",
    "qwen-4-sde-3.0",
    "flux-0-sde-1.0",
    "flux-4-cps-3.0",
    "z_image-0-sde-1.0",
    "z_image-4-dance_sde-3.0",
)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_log_probs_are_exact(world: World, folder: Path, lora_rank: int, sde_type: str, guidance: float) -> None:
    policy = make_policy(world, folder, lora_rank=lora_rank)
    disturb(policy)
    assert_exact(policy, make_samples(policy, guidance=guidance, sde_type=sde_type))


@pytest.mark.quick(
    "sd3-0-gradient_checkpointing",
    "sd3-4-dtype",
    "qwen-0-dtype,gradient_checkpointing,detach_uncond",
    "qwen-4-detach_uncond",
    "flux-0-dtype",
    "flux-4-attn_backend",
    "z_image-0-gradient_checkpointing",
    "z_image-4-dtype,lora_dtype",
)
@pytest.mark.parametrize(
    "model",
    [
        {"gradient_checkpointing": True},
        {"detach_uncond": True},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "lora_dtype": "bfloat16"},
        {"dtype": "bfloat16", "gradient_checkpointing": True, "detach_uncond": True},
        {"attn_backend": "native"},
    ],
    ids=lambda model: ",".join(model),
)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_log_probs_are_exact_under(world: World, folder: Path, lora_rank: int, model: dict[str, Any]) -> None:
    policy = make_policy(world, folder, lora_rank=lora_rank, **model)
    disturb(policy)
    assert_exact(policy, make_samples(policy))


def test_log_probs_are_exact_where_all_steps_are_trained(world: World, folder: Path) -> None:
    policy = make_policy(world, folder, lora_rank=4)
    disturb(policy)
    # 12 images in micro-batches of 9 and 3: only the 9 are replayed at their own shape
    samples = make_samples(policy, window=None, num_inference_steps=4)
    assert samples.log_prob is not None
    for part in torch.arange(9).split(MICRO):
        assert torch.equal(policy.replay(samples.trace.select(part)).log_prob, samples.log_prob[part])


def test_the_ratio_leaves_1_when_the_weights_change(world: World, folder: Path) -> None:
    policy = make_policy(world, folder, lora_rank=4)
    samples = make_samples(policy)
    disturb(policy)
    batch = make_batch(samples, micro_batches(samples)[0])
    stats = reduced(Algorithm(Config()).loss(policy, batch)[1], batch.weight)
    assert stats["first_ratio_error"] > 1e-4 and stats["clipfrac"] > 0


@torch.no_grad()
def reference_means(policy: FlowPolicy, samples: Samples) -> Tensor:
    with policy.using("reference"), policy.unsharded():
        parts = torch.arange(len(samples.index)).split(MICRO)
        return torch.cat([policy.replay(samples.trace.select(part)).mean for part in parts])


@pytest.mark.quick("sd3-4-float32", "qwen-0-bfloat16", "flux-4-bfloat16", "z_image-0-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_kl_is_exactly_0_before_any_update(world: World, folder: Path, lora_rank: int, dtype: str) -> None:
    policy, rule = make_policy(world, folder, lora_rank=lora_rank, dtype=dtype), Algorithm(Config(kl_loss_coef=10.0))
    policy.trained.keep_reference()
    samples = make_samples(policy)
    means = reference_means(policy, samples)
    parts = micro_batches(samples)
    for part in parts:
        batch = make_batch(samples, part, means[part])
        loss, metrics = rule.loss(policy, batch)
        stats = reduced(metrics, batch.weight)
        assert stats["kl_ref"] == 0 and stats["first_ratio_error"] == 0
        assert torch.equal(loss, torch.tensor([-1.5, 0.5, -0.25])[:, None].expand(-1, 2))
    disturb(policy)
    assert torch.equal(reference_means(policy, samples), means)
    batch = make_batch(samples, parts[0], means[parts[0]])
    assert reduced(rule.loss(policy, batch)[1], batch.weight)["kl_ref"] > 0


def sharded(folder: Path, lora_rank: int, keys: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    """Log-probs of this rank's rollout and replay, and the gradient's norm, with weights sharded over two ranks."""
    parallel = ParallelConfig(**keys)
    world = start_world(parallel)
    model = FlowModelConfig(path=str(folder), dtype="float32", lora_rank=lora_rank, gradient_checkpointing=True)
    policy = build_policy(
        model, parallel, FlowDataConfig(max_prompt_length=MAX_LENGTH), world, seed=0, detach_uncond=False
    )
    config = FlowRolloutConfig(n=4, num_inference_steps=4, height=32, width=48, **{policy.model.guidance_key: 3.0})
    samples = sample(PolicyRollout(policy, config, world, 4))
    assert samples.log_prob is not None
    replays = []
    for i, part in enumerate(torch.arange(6).split(2)):
        policy.trained.sharded.set_last_micro_batch(i == 2)
        replays.append(policy.replay(samples.trace.select(part)).log_prob)
        (replays[-1] * torch.tensor([1.0, -2.0])[:, None]).sum().backward()
    policy.trained.sharded.reduce_gradients()
    return samples.log_prob, torch.cat(replays).detach(), float(policy.trained.sharded.clip_gradients(0.0))


SHARDINGS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (4, {}),
    (4, {"lora_sharding": "replicate"}),
    (4, {"rollout_unsharded": False, "reshard_after_forward": False}),
]
# the layout of LoRAs does not depend on the family: two families have all layouts, the others only two
SHARDED = [(family, *case) for family in ("sd3", "qwen") for case in SHARDINGS]
SHARDED += [(family, *case) for family in ("flux", "z_image") for case in SHARDINGS[:2]]


@pytest.mark.quick("sd3-4-keys1", "qwen-0-keys4", "flux-4-keys9", "z_image-0-keys10")
@pytest.mark.parametrize(("folder", "lora_rank", "keys"), SHARDED, indirect=["folder"])
def test_log_probs_are_exact_on_sharded_weights(folder: Path, lora_rank: int, keys: dict[str, Any]) -> None:
    """Also if some trained layers, those of the text in the last block, have no gradient."""
    two: list[tuple[Tensor, Tensor, float]] = run_ranks(sharded, 2, folder, lora_rank, keys)
    for rollout, replay, norm in two:
        assert rollout.shape == (6, 2)  # [12, 9] of 32 x 48 pixels over 2 ranks
        assert torch.equal(rollout[:4], replay[:4])
        assert norm > 0 and norm == two[0][2]
    plain: Callable[..., Any] = sharded
    [(_, _, alone)] = run_ranks(plain, 1, folder, lora_rank, keys)
    assert alone > 0
