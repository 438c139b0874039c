"""Diffusion-DPO in the loop, on sampled pairs and on pairs of the data."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRLConfig
from phalanx.run.rl import build
from tests.helpers.checks import refused
from tests.helpers.jobs import algorithm_config, assert_same_weights, fit, one_step, update
from tests.helpers.kinds import check
from tests.helpers.pairs import rows, write_parquet
from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("datasets_cache")

LORA = "model.lora_rank=4"
OFFLINE = ("rollout.engine=dataset", "rollout.n=2", "reward.functions=[{name: preferred}]", "data.max_prompt_length=32")


def configure(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    """A tiny job of diffusion_dpo."""
    fixed = ("rollout.micro_batch_size_per_gpu=4", "algorithm.beta=100")
    return algorithm_config(model, folder, "diffusion_dpo", *fixed, *overrides)


def offline(model: Path, folder: Path, *overrides: str) -> FlowRLConfig:
    """The same on pairs of the data."""
    folder.mkdir(parents=True, exist_ok=True)
    file = write_parquet(folder / "pairs.parquet", rows())
    return configure(model, folder, *OFFLINE, f"data.train_files=[{file}]", "rollout.guidance_scale=1", *overrides)


def assert_same_step(one: list[dict[str, Any]], two: list[dict[str, Any]], lr: float) -> None:
    assert torch.equal(one[0]["images"], torch.cat([part["images"] for part in two]))
    assert torch.equal(one[0]["reward"], two[0]["reward"])
    row, other = one[0]["row"], two[0]["row"]
    assert row["actor/grad_norm"] > 1e-4
    for key in ("actor/grad_norm", "actor/margin", "actor/accuracy"):
        assert other[key] == pytest.approx(row[key], rel=1e-4, abs=1e-6), key
    assert_same_weights(one[0]["weights"], two[0]["weights"], lr)


@pytest.mark.full
@pytest.mark.seldom("full")
@pytest.mark.parametrize("kind", [(), (LORA, "algorithm.kl_loss_coef=0.01")], ids=["full", "lora"])
def test_layouts_agree(kind: tuple[str, ...], sd3_folder: Path, tmp_path: Path) -> None:
    one = run_ranks(one_step, 1, configure(sd3_folder, tmp_path, *kind))
    cfg = configure(sd3_folder, tmp_path, *kind, "parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)
    # one image a pass is one pair a pass; three would cut a pair in two
    for micro in (1, 4):
        cfg = configure(sd3_folder, tmp_path, *kind, f"actor.ppo_micro_batch_size_per_gpu={micro}")
        assert_same_step(one, run_ranks(one_step, 1, cfg), cfg.optim.lr)


@pytest.mark.full
def test_groups_are_trained_as_one(sd3_folder: Path, tmp_path: Path) -> None:
    """DGPO: a pass has whole prompts for any micro-batch size, and each prompt is on one rank."""

    def configured(*overrides: str) -> FlowRLConfig:
        fixed = ("rollout.micro_batch_size_per_gpu=4", "algorithm.beta=10")
        return algorithm_config(sd3_folder, tmp_path, "dgpo", *fixed, LORA, "algorithm.kl_loss_coef=0.01", *overrides)

    one = run_ranks(one_step, 1, configured("actor.ppo_micro_batch_size_per_gpu=8"))  # two groups a pass
    cfg = configured("parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)
    assert one[0]["row"]["actor/kl_ref"] > 0


def test_odd_micro_batches_keep_pairs(sd3_folder: Path, tmp_path: Path) -> None:
    """3 of 6 images per pass: the reference and the loss still get whole pairs."""
    numbers = ("rollout.n=6", "rollout.micro_batch_size_per_gpu=6")
    one = run_ranks(one_step, 1, configure(sd3_folder, tmp_path, *numbers))
    cfg = configure(sd3_folder, tmp_path, *numbers, "actor.ppo_micro_batch_size_per_gpu=3")
    assert_same_step(one, run_ranks(one_step, 1, cfg), cfg.optim.lr)


@pytest.mark.full
@pytest.mark.long
def test_qwen_image(qwen_folder: Path, tmp_path: Path) -> None:
    """Packed latents, padded texts and true guidance."""
    one = run_ranks(one_step, 1, configure(qwen_folder, tmp_path, LORA, "algorithm.train_timesteps=1"))
    cfg = configure(qwen_folder, tmp_path, LORA, "algorithm.train_timesteps=1", "parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)


def first_update(cfg: FlowRLConfig) -> dict[str, Any]:
    """Outputs of the reference and of the policy before the first update, and the losses of the pairs."""
    t = build(cfg)
    with t.collector.rollout.awake():
        samples = t.collector.rollout.sample(
            t.collector.prompts.batch(0), seed=0, step=0, each=t.collector.rewards.submit
        )
    samples, reward, _ = t.collector.reward(samples, 0)
    losses, views = [], []
    rule_loss = t.updater.algorithm.loss

    def watched(policy: Any, batch: Any) -> Any:
        loss, stats = rule_loss(policy, batch)
        losses.append(loss.detach())
        views.append(
            (t.updater.algorithm.reference_output(policy, batch).detach() - batch.reference_outputs["reference"])
            .abs()
            .max()
        )
        return loss, stats

    t.updater.algorithm.loss = watched  # type: ignore[method-assign]
    t.updater.chunk_plan = replace(t.updater.plan, updates=1)
    update(t, samples, reward, 0)
    return {
        "losses": torch.cat(losses),
        "apart": float(max(views)),
        "pairs": t.updater.algorithm.units(reward, t.updater.group_id),
    }


def test_it_begins_at_the_reference(sd3_folder: Path, tmp_path: Path) -> None:
    """Reference and training use the same noise in the same order: the policy equals the reference bit for bit."""
    seen = run_ranks(first_update, 1, configure(sd3_folder, tmp_path))[0]
    assert seen["apart"] == 0.0
    assert seen["losses"].shape == (4, 2)
    torch.testing.assert_close(seen["losses"], torch.full((4, 2), 2.0).log(), rtol=0, atol=1e-7)


def test_whole_prompts_divide_over_the_ranks(sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with refused(
        "actor.ppo_mini_batch_size: 2 whole prompts do not divide over 4 ranks; "
        "nearest that work: actor.ppo_mini_batch_size=4",
        ConfigError,
    ):
        check(configure(sd3_folder, tmp_path))


# --- pairs of the data


def test_offline_layouts_agree(sd3_folder: Path, tmp_path: Path) -> None:
    one = run_ranks(one_step, 1, offline(sd3_folder, tmp_path))
    cfg = offline(sd3_folder, tmp_path, "parallel.fsdp_size=2")
    assert_same_step(one, run_ranks(one_step, 2, cfg), cfg.optim.lr)
    assert one[0]["reward"].view(4, 2).sum(1).tolist() == [1.0] * 4
    assert {0.0, 1.0} == set(one[0]["reward"][::2].tolist())  # either comes first
    assert one[0]["log_prob"].shape == (8, 0) and one[0]["latents"].shape == (8, 1, 4, 8, 8)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_it_learns_what_is_preferred(sd3_folder: Path, tmp_path: Path) -> None:
    """At fixed levels the loss falls and the winners' implicit rewards rise; the policy samples for validation."""
    (tmp_path / "held_out.txt").write_text('a "sign"\nanother "one"\n')
    cfg = offline(
        sd3_folder,
        tmp_path,
        LORA,
        "optim.lr=3e-3",
        "trainer.total_training_steps=12",
        "trainer.test_freq=12",
        f"data.val_files=[{tmp_path / 'held_out.txt'}]",
        "reward.functions=[{name: preferred}, {name: jpeg_incompressibility, weight: 0}]",
    )
    run_ranks(fit, 2, cfg)
    found = metrics(tmp_path)
    steps = [row for row in found if "actor/margin" in row]
    assert len(steps) == 12
    assert all(row["reward/mean"] == 0.5 and row["reward/zero_std_ratio"] == 0 for row in steps)
    assert steps[0]["actor/margin"] < 0.2 and steps[-1]["actor/margin"] > 1.0
    assert steps[-1]["actor/accuracy"] > 0.9
    assert found[-1]["val/held_out/reward/preferred"] == 0.0
    assert found[-1]["val/held_out/reward/jpeg_incompressibility"] > 0


@pytest.mark.quick("sft")
@pytest.mark.parametrize("name", ["sft", "rwr", "awm"])
def test_other_rules_on_the_same_data(name: str, sd3_folder: Path, tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "pairs.parquet", rows())
    own = (f"data.train_files=[{file}]", "actor.ppo_mini_batch_size=4", LORA)
    row = run_ranks(one_step, 1, algorithm_config(sd3_folder, tmp_path, name, *OFFLINE, *own))[0]["row"]
    assert row["actor/grad_norm"] > 1e-4 and row["actor/updates_skipped"] == 0


def test_an_image_that_cannot_be_read_ends_all_ranks(sd3_folder: Path, tmp_path: Path) -> None:
    table = rows()
    table[2]["rejected"] = b"no picture"
    file = write_parquet(tmp_path / "bad.parquet", table)
    cfg = offline(sd3_folder, tmp_path, f"data.train_files=[{file}]", "parallel.fsdp_size=1")
    with pytest.raises(RankError) as error:
        run_ranks(fit, 2, cfg)
    said = f"data.train_files: {file}, row 2: rejected: the image cannot be read: its format is unknown; data.unusable_rows"
    assert str(error.value).count(f"DataError: {said}") == 2, error.value


@pytest.mark.full
def test_offline_resume(sd3_folder: Path, tmp_path: Path) -> None:
    """The images of a step are a function of the step: a resumed run equals one that was not stopped."""
    keys = (LORA, "trainer.save_freq=1", "trainer.max_checkpoints=4")
    whole = run_ranks(fit, 1, offline(sd3_folder, tmp_path / "whole", *keys, "trainer.total_training_steps=3"))[0]
    run_ranks(fit, 1, offline(sd3_folder, tmp_path / "parts", *keys, "trainer.total_training_steps=2"))
    parts = run_ranks(fit, 1, offline(sd3_folder, tmp_path / "parts", *keys, "trainer.total_training_steps=3"))[0]
    for name, value in whole.items():
        assert torch.equal(value, parts[name]), name
