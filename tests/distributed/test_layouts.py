"""All layouts agree: bit-identical samples and equal gradients on any mesh and micro-batch size."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.flow import FlowRLConfig
from tests.helpers.jobs import assert_same_weights, one_step, tiny_config
from tests.helpers.ranks import run_ranks

LORA = ("model.lora_rank=4",)
# (ranks, overrides): replicas only, shards only, both, LoRA beside its shards, all weights gathered step by step
LAYOUTS = [
    (2, ("parallel.fsdp_size=1",)),
    (2, ("parallel.fsdp_size=2",)),
    (4, ("parallel.fsdp_size=1",)),
    (4, ("parallel.fsdp_size=2",)),
    (4, ("parallel.fsdp_size=4",)),
    (4, ("parallel.fsdp_size=2", "parallel.rollout_unsharded=false", "parallel.reshard_after_forward=false")),
    (2, ("parallel.fsdp_size=2", "parallel.param_offload=true")),
    (2, ("parallel.fsdp_size=1", "parallel.optimizer_offload=true")),
    (2, ("parallel.fsdp_size=2", "parallel.optimizer_offload=true")),
]
MICRO_BATCHES = ("actor.ppo_micro_batch_size_per_gpu=1", "actor.ppo_micro_batch_size_per_gpu=4")


def together(parts: list[dict[str, Any]], key: str) -> torch.Tensor:
    return torch.cat([part[key] for part in parts])


def assert_same_step(reference: list[dict[str, Any]], other: list[dict[str, Any]], lr: float) -> None:
    for key in ("images", "latents", "log_prob"):
        assert torch.equal(together(reference, key), together(other, key)), key
    assert torch.equal(reference[0]["reward"], other[0]["reward"])
    norm = reference[0]["row"]["actor/grad_norm"]
    assert norm > 1e-4
    for part in other:
        assert part["row"]["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert part["row"].keys() == reference[0]["row"].keys()
    assert_same_weights(reference[0]["weights"], other[0]["weights"], lr)


def configure(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    # the rollout's micro-batch is fixed, because it affects a sample's last bits
    return tiny_config(model, folder, "rollout.micro_batch_size_per_gpu=4", *overrides)


@pytest.fixture(scope="module", params=["lora", "full"])
def sd3_reference(
    request: pytest.FixtureRequest, sd3_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    kind = LORA if request.param == "lora" else ()
    kind += ("algorithm.kl_loss_coef=0.04",)
    cfg = configure(sd3_folder, tmp_path_factory.mktemp("reference"), *kind)
    return kind, run_ranks(one_step, 1, cfg)


@pytest.mark.seldom(
    "lora-2-parallel.fsdp_size=2",
    "lora-4-parallel.fsdp_size=1",
    "lora-4-parallel.fsdp_size=4",
    "lora-4-parallel.fsdp_size=2-parallel.rollout_unsharded=false-parallel.reshard_after_forward=false",
    "lora-2-parallel.fsdp_size=1-parallel.optimizer_offload=true",
    "lora-2-parallel.fsdp_size=2-parallel.optimizer_offload=true",
    "full-2-parallel.fsdp_size=1",
    "full-4-parallel.fsdp_size=1",
    "full-4-parallel.fsdp_size=2",
    "full-2-parallel.fsdp_size=2-parallel.optimizer_offload=true",
)
@pytest.mark.quick("lora-2-parallel.fsdp_size=1", "full-2-parallel.fsdp_size=2")
@pytest.mark.parametrize(("world", "layout"), LAYOUTS, ids=lambda v: "-".join(v) if isinstance(v, tuple) else str(v))
def test_layout(world: int, layout: tuple[str, ...], sd3_reference: Any, sd3_folder: Path, tmp_path: Path) -> None:
    kind, reference = sd3_reference
    cfg = configure(sd3_folder, tmp_path, *kind, *layout)
    assert_same_step(reference, run_ranks(one_step, world, cfg), cfg.optim.lr)


@pytest.mark.seldom("lora-actor.ppo_micro_batch_size_per_gpu=4", "full-actor.ppo_micro_batch_size_per_gpu=4")
@pytest.mark.quick("lora-actor.ppo_micro_batch_size_per_gpu=1")
@pytest.mark.parametrize("micro", MICRO_BATCHES)
def test_actor_micro_batch(micro: str, sd3_reference: Any, sd3_folder: Path, tmp_path: Path) -> None:
    kind, reference = sd3_reference
    cfg = configure(sd3_folder, tmp_path, *kind, micro)
    assert_same_step(reference, run_ranks(one_step, 1, cfg), cfg.optim.lr)


@pytest.mark.full
def test_replicated_lora_over_a_sharded_base(qwen_folder: Path, tmp_path: Path) -> None:
    cfg = configure(qwen_folder, tmp_path, *LORA)
    reference = run_ranks(one_step, 1, cfg)
    for lora in ("shard", "replicate"):
        sharded = configure(qwen_folder, tmp_path, *LORA, "parallel.fsdp_size=2", f"parallel.lora_sharding={lora}")
        assert_same_step(reference, run_ranks(one_step, 4, sharded), cfg.optim.lr)
    assert reference[0]["row"]["actor/first_ratio_error"] == 0.0


@pytest.mark.seldom("flux-full", "z_image-lora")
@pytest.mark.quick("z_image-full")
@pytest.mark.parametrize("kind", [LORA, ()], ids=["lora", "full"])
@pytest.mark.parametrize("family", ["flux", "z_image"])
def test_shards_of_other_families(
    family: str, kind: tuple[str, ...], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    # long enough for texts of Z-Image that are padded to different lengths
    cfg = configure(request.getfixturevalue(f"{family}_folder"), tmp_path, *kind, "data.max_prompt_length=64")
    reference = run_ranks(one_step, 1, cfg)
    cfg.parallel.fsdp_size = 2
    assert_same_step(reference, run_ranks(one_step, 2, cfg), cfg.optim.lr)
    assert reference[0]["row"]["actor/first_ratio_error"] == 0.0


@pytest.mark.full
@pytest.mark.parametrize("kind", [LORA, ()], ids=["lora", "full"])
def test_mixed_precision_layouts_agree(kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path) -> None:
    """bf16 compute over float32 weights: replicated ranks keep copies, FSDP casts; both compute the same."""
    wanted = ("model.dtype=bfloat16", *kind)
    one = run_ranks(one_step, 1, configure(sd3_folder, tmp_path, *wanted))
    two = run_ranks(one_step, 2, configure(sd3_folder, tmp_path, *wanted, "parallel.fsdp_size=2"))
    assert torch.equal(together(one, "images"), together(two, "images"))
    assert one[0]["row"]["actor/grad_norm"] == pytest.approx(two[0]["row"]["actor/grad_norm"], rel=2e-2)
    assert all(value.dtype == torch.float32 for value in two[0]["weights"].values())


def test_a_batch_per_rank_is_the_batch_of_all(sd3_folder: Path, tmp_path: Path) -> None:
    """2 prompts per rank, 1 of them per update, on 2 ranks are 4 and 2 in total."""
    whole = run_ranks(one_step, 2, configure(sd3_folder, tmp_path, *LORA))
    own = ("data.train_batch_size=32", "data.train_batch_size_per_gpu=2")
    own += ("actor.ppo_mini_batch_size=16", "actor.ppo_mini_batch_size_per_gpu=1")
    assert_same_step(whole, run_ranks(one_step, 2, configure(sd3_folder, tmp_path, *LORA, *own)), lr=1e-3)


def compiled_step(cfg: FlowRLConfig) -> dict[str, Any]:
    torch.compile = partial(torch.compile, backend="eager")  # generating code for the graphs would take minutes
    return one_step(cfg)


@pytest.mark.long
def test_compiled_blocks_are_sharded_and_checkpointed(sd3_folder: Path, tmp_path: Path) -> None:
    """With one graph for rollout and training: the first update has a ratio of exactly 1."""
    keys = (*LORA, "actor.ppo_micro_batch_size_per_gpu=2")
    reference = run_ranks(one_step, 1, configure(sd3_folder, tmp_path / "a", *keys))
    fast = ("model.compile=true", "model.gradient_checkpointing=true", "parallel.fsdp_size=2")
    cfg = configure(sd3_folder, tmp_path / "b", *keys, *fast)
    found = run_ranks(compiled_step, 2, cfg, timeout=240)
    assert all(part["row"]["actor/first_ratio_error"] == 0 for part in (*reference, *found))
    torch.testing.assert_close(together(found, "images"), together(reference, "images"), rtol=0, atol=1e-3)
    norm = reference[0]["row"]["actor/grad_norm"]
    assert found[0]["row"]["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
