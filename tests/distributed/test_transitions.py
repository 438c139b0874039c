"""Algorithms on the sampled transitions in the loop: a training step is the same on one rank and on two."""

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.flow import FlowRLConfig
from phalanx.run.rules import load_config
from tests.helpers.jobs import PROMPTS, base_overrides, one_step
from tests.helpers.ranks import run_ranks

LORA = "model.lora_rank=4"
REFERENCE = "algorithm.kl_loss_coef=0.04"
FLASH = ("rollout.solver=dpm_solver++", "rollout.ode_compression=0.5", "rollout.num_inference_steps=7")
# (algorithm, overrides); a rollout micro-batch of 4 is 2 images x 2 trained steps
RULES = [
    ("grpo_guard", (LORA, REFERENCE)),
    ("grpo_guard", ("rollout.sde_type=dance_sde", "algorithm.importance=sequence")),
    ("flow_dppo", (LORA, "algorithm.threshold=1e-9")),
    ("flow_dppo", ("rollout.sde_type=cps", "algorithm.timestep_weight=noise", REFERENCE)),
    ("dance_grpo", (LORA,)),
    ("mix_grpo", (LORA, *FLASH, "algorithm.importance=sequence")),
    ("tempflow_grpo", (LORA, "rollout.sde_window_range=[2,3]")),
    ("cps", (LORA, "algorithm.timestep_weight=noise", "algorithm.clip_ratio=1e-6")),
    ("flow_grpo", (LORA, "algorithm.group_filter=top_bottom", "algorithm.group_filter_k=1")),
]


def configure(model: Path, folder: Path, name: str, *overrides: str) -> FlowRLConfig:
    """A tiny job of tests.helpers.jobs with another algorithm and its default sampling."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    own = ("algorithm.", "rollout.sde_window_size") if name in ("dance_grpo", "tempflow_grpo") else ("algorithm.",)
    base = [o for o in base_overrides(model, folder) if not o.startswith(own)]
    return load_config(FlowRLConfig, None, [*base, f"algorithm.name={name}", *overrides])


def assert_same_step(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for key in ("images", "latents", "log_prob"):
        assert torch.equal(one[key], torch.cat([part[key] for part in two])), key
    assert torch.equal(one["reward"], two[0]["reward"])
    row, other = one["row"], two[0]["row"]
    assert row.keys() == other.keys() and row["actor/updates_skipped"] == 0
    assert row["actor/grad_norm"] > 1e-5
    assert other["actor/grad_norm"] == pytest.approx(row["actor/grad_norm"], rel=1e-5)


@pytest.mark.seldom(
    "grpo_guard-model.lora_rank=4-algorithm.kl_loss_coef=0.04",
    "grpo_guard-rollout.sde_type=dance_sde-algorithm.importance=sequence",
)
@pytest.mark.quick("flow_grpo-model.lora_rank=4-algorithm.group_filter=top_bottom-algorithm.group_filter_k=1")
@pytest.mark.parametrize(("name", "kind"), RULES, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_layouts_agree(name: str, kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path) -> None:
    cfg = configure(sd3_folder, tmp_path, name, *kind)
    [one] = run_ranks(one_step, 1, cfg)
    split = configure(sd3_folder, tmp_path, name, *kind, "parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, split))
    assert one["log_prob"].shape == (16, 1 if name == "tempflow_grpo" else 2)
    assert one["row"]["actor/first_ratio_error"] == 0.0  # the old policy is exactly the one that sampled
    assert ("actor/kl_ref" in one["row"]) == (REFERENCE in kind)
    if name == "flow_dppo":
        assert one["row"]["actor/divergence"] > 0  # of the second update
    if name == "dance_grpo":
        first = one["latents"][:, 0].flatten(1).view(4, 4, -1)
        assert torch.equal(first, first[:, :1].expand_as(first))
        assert one["latents"].shape[1] == 4  # 3 stochastic steps, of which 2 are trained


def test_the_mask_stops_what_moves_away(sd3_folder: Path, tmp_path: Path) -> None:
    """Three epochs over the samples: with a small threshold many steps are dropped, with a large one none."""
    passes = (LORA, "actor.ppo_epochs=3", "optim.lr=1e-2")
    tight, loose = (
        run_ranks(one_step, 1, configure(sd3_folder, tmp_path, "flow_dppo", *passes, f"algorithm.threshold={t}"))[0]
        for t in ("1e-9", "1e9")
    )
    assert 0.1 < tight["row"]["actor/maskfrac"] < 0.9 and loose["row"]["actor/maskfrac"] == 0
    assert torch.equal(tight["images"], loose["images"])
    assert loose["row"]["actor/divergence"] > tight["row"]["actor/divergence"] > 0


@pytest.mark.seldom("dance_grpo")
@pytest.mark.full
@pytest.mark.parametrize("name", ["grpo_guard", "dance_grpo"])
def test_qwen_image(name: str, qwen_folder: Path, tmp_path: Path) -> None:
    """Packed latents, padded texts and true guidance."""
    [one] = run_ranks(one_step, 1, configure(qwen_folder, tmp_path, name, LORA, REFERENCE))
    split = configure(qwen_folder, tmp_path, name, LORA, REFERENCE, "parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, split))
    assert one["row"]["actor/first_ratio_error"] == 0.0
