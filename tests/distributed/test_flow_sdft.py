"""A flow model learns from itself with another prompt, such as one that a language model wrote."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.config.flow import FlowRLConfig
from phalanx.run.rl import build
from phalanx.run.rules import load_config
from tests.helpers.jobs import PROMPTS, assert_same_weights, base_overrides, fit, rows, update
from tests.helpers.ranks import RankError, run_ranks
from tests.helpers.roles import run_roles


def config(model: Path, folder: Path, *overrides: str, told: str | None = "{} in a garden at dawn") -> FlowRLConfig:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": p, "enhanced_prompt": told and told.format(p)}) for p in PROMPTS]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    base = [o for o in base_overrides(model, folder) if not o.startswith(("algorithm.", "reward.", "data.train_files"))]
    fixed = [
        "rollout.micro_batch_size_per_gpu=4",
        "algorithm.name=flow_sdft",
        f"data.train_files=[{folder}/prompts.jsonl]",
    ]
    return load_config(FlowRLConfig, None, [*base, *fixed, *overrides])


def divergence(cfg: FlowRLConfig) -> dict[str, float]:
    """The metric of a first step, and the mean of (mu - mu_T)^2 / 2 sigma_q^2 of steps replayed by hand."""
    t = build(cfg)
    samples, _ = t.collector.sample(0)
    with torch.no_grad():
        replay = t.policy.replay(samples.trace)
        first = samples.index[0] // cfg.rollout.n
        prompts = t.collector.prompts.batch(0)[first : first + int(samples.trace.prompt_index.max()) + 1]
        told = [replace(prompt, text=prompt.meta["enhanced_prompt"]) for prompt in prompts]
        rollout = t.collector.rollout
        trace = replace(samples.trace, embeds=rollout.collate(told, negatives=rollout.sampler.guided))
        theirs = t.policy.replay(trace)
    if cfg.algorithm.loss_type == "velocity":
        apart = (replay.velocity - theirs.velocity).flatten(2).square().mean(-1)
    else:
        std = replay.std.view(1, -1) if replay.std.ndim == 1 else replay.std.flatten(1)[:, : replay.mean.shape[1]]
        apart = (replay.mean - theirs.mean).flatten(2).square().mean(-1) / (2 * std**2)
    row = update(t, samples, torch.zeros(t.updater.plan.samples), 0)
    return {"found": row[f"actor/teacher_{cfg.algorithm.loss_type}"], "expected": float(apart.mean())}


@pytest.mark.quick("kl")
@pytest.mark.parametrize("loss_type", ["kl", "velocity"])
def test_the_teacher_has_the_other_prompt(loss_type: str, sd3_folder: Path, tmp_path: Path) -> None:
    keys = (f"algorithm.loss_type={loss_type}", "rollout.guidance_scale=2", "actor.ppo_mini_batch_size=4")
    (seen,) = run_ranks(divergence, 1, config(sd3_folder, tmp_path, *keys))
    assert seen["found"] == pytest.approx(seen["expected"], rel=1e-4) and seen["found"] > 1e-6


@pytest.mark.full
def test_layouts_and_a_resumed_run(sd3_folder: Path, tmp_path: Path) -> None:
    """The teacher follows the policy, and its weights are in the checkpoint."""
    keys = ("algorithm.teacher_update_rate=0.5", "trainer.total_training_steps=3", "trainer.save_freq=1")
    (one,) = run_ranks(fit, 1, config(sd3_folder, tmp_path / "one", *keys))
    run_ranks(fit, 2, config(sd3_folder, tmp_path / "two", *keys, "trainer.total_training_steps=2"))
    two = run_ranks(fit, 2, config(sd3_folder, tmp_path / "two", *keys))
    first, second = rows(tmp_path / "one" / "out"), rows(tmp_path / "two" / "out")
    key = "actor/teacher_kl"
    assert [row[key] for row in second] == pytest.approx([row[key] for row in first], rel=1e-3)
    assert_same_weights(one, two[0], 1e-3)


@pytest.mark.full
def test_the_student_comes_nearer(sd3_folder: Path, tmp_path: Path) -> None:
    """With the teacher's weights of the start, at one place of the schedule."""
    keys = ("trainer.total_training_steps=16", "rollout.sde_window_range=[1,3]", "optim.lr=1e-3",
            "algorithm.teacher_update_rate=0")  # fmt: skip
    run_ranks(fit, 1, config(sd3_folder, tmp_path, *keys))
    found = [row["actor/teacher_kl"] for row in rows(tmp_path / "out")]
    assert sum(found[-4:]) < 0.5 * sum(found[:4]), found


def test_rows_without_the_prompt(sd3_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"prompts.jsonl:1: no text in the column enhanced_prompt; see algorithm.conte"):
        run_ranks(fit, 1, config(sd3_folder, tmp_path, told=None))


@pytest.mark.full
def test_roles(sd3_folder: Path, tmp_path: Path) -> None:
    found = []
    for name, ranks, more in (("together", 1, ()), ("apart", 3, ("placement={rollout: 0-1, actor: 2}",))):
        cfg = config(sd3_folder, tmp_path / name, "trainer.total_training_steps=2", "parallel.fsdp_size=1", *more)
        run_roles(build, ranks, cfg)
        found.append(rows(Path(cfg.trainer.output_dir)))
    for one, other in zip(*found, strict=True):
        assert one["actor/teacher_kl"] > 1e-6
        for key in ("actor/teacher_kl", "actor/grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-5), key
