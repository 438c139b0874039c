"""Training on vLLM-omni's samples by the real command, beside the same training on the policy's own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.jobs import base_overrides, one_step, tiny_config
from tests.helpers.judged import config, settings
from tests.helpers.ranks import run_ranks
from tests.helpers.tasks import run_task
from tests.vllm import omni_cpu_platform

# smooth, unlike the length of a JPEG, which jumps where a pixel is rounded the other way
REWARD = """
def redness(images, prompts, metadata):
    return images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))
"""
TASK = Path(omni_cpu_platform.__file__).with_name("train_on_cpu.py")


def train(model: Path, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Four steps with validation of the average on two ranks that share the weights; the rows of metrics.jsonl."""
    tiny_config(model, folder)  # writes the prompts
    (folder / "val.txt").write_text('a door with "eta" on it\n"theta"\n')
    (folder / "reward.py").write_text(REWARD)
    shared_memory = set(Path("/dev/shm").iterdir())
    done = run_task(
        [
            TASK,
            *base_overrides(model, folder),
            f"data.val_files=[{folder / 'val.txt'}]",
            f"reward.functions=[{{path: {folder / 'reward.py'}:redness}}]",
            "data.max_prompt_length=64",
            "actor.ema.decay=0.5",
            "optim.lr=1e-4",
            "trainer.total_training_steps=4",
            "trainer.test_freq=2",
            *overrides,
        ],
        nproc=2,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if line.startswith(("INFO", "WARNING", "ERROR"))]
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.seldom("sd3_folder-0")
@pytest.mark.parametrize(("model", "lora"), [("sd3_folder", 0), ("qwen_folder", 4)])
def test_it_learns_what_the_policy_learns(
    model: str, lora: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Rewards of every step, held-out ones of the average, and the sizes of the gradients."""
    path = request.getfixturevalue(model)
    ours = train(path, tmp_path / "policy", f"model.lora_rank={lora}")
    engines = train(path, tmp_path / "engine", f"model.lora_rank={lora}", "rollout.engine=vllm_omni")
    assert [row["step"] for row in engines] == list(range(5))
    for mine, its in zip(ours, engines, strict=True):
        assert [key for key in mine if key not in its] == []
        for key in ("reward/mean", "reward/std", "val/val/reward/mean"):
            assert key not in mine or its[key] == pytest.approx(mine[key], rel=1e-2, abs=1e-5), (mine["step"], key)
        if "actor/grad_norm" in mine:
            assert its["actor/grad_norm"] == pytest.approx(mine["actor/grad_norm"], rel=1e-2), mine["step"]
    for row in engines[1:]:
        # 0 where the machine's kernels for both happen to be the same
        assert 0 <= row["rollout/logprob_abs_diff_mean"] <= row["rollout/logprob_abs_diff_max"] < 2e-6
        assert row["rollout/correction_weight_mean"] == 1.0
        assert row["actor/first_ratio_error"] < 1e-6 and row["time/rescore"] > 0
    assert not any(key.startswith("rollout/") for row in ours for key in row)


@pytest.mark.seldom("none", "rejection")
@pytest.mark.parametrize("correction", ["none", "truncated_is", "rejection"])
def test_corrections(correction: str, sd3_folder: Path, tmp_path: Path) -> None:
    """A limit between the mean and the largest difference rejects some steps and keeps others."""
    rows = train(
        sd3_folder,
        tmp_path,
        "rollout.engine=vllm_omni",
        f"rollout.correction={correction}",
        "rollout.correction_limit=1e-8",
    )
    for row in rows[1:]:
        if correction == "none":
            assert 0 < row["actor/first_ratio_error"] < 2e-6  # the engine's kernels against the policy's
            assert "time/rescore" in row and "rollout/logprob_abs_diff_mean" not in row
        else:
            assert row["actor/first_ratio_error"] < 1e-6
            weight = row["rollout/correction_weight_mean"]
            assert 0 < weight < 1 if correction == "rejection" else weight == pytest.approx(1, abs=2e-6)


def step_with_omni(cfg: Any) -> dict[str, Any]:
    omni_cpu_platform.install()
    return one_step(cfg)


def test_it_lives_beside_a_judge(sd3_folder: Path, judge_model: Path, tmp_path: Path) -> None:
    """A reward model on both ranks together and the engine on each: the images and weights are those without the judge."""
    engine, rule = "rollout.engine=vllm_omni", "{name: jpeg_incompressibility}"
    alone = config(sd3_folder, tmp_path / "a", engine, f"reward.functions=[{rule}]")
    judges = settings(judge_model, rule, "{name: vlm_ocr, weight: 0}")
    judged = config(sd3_folder, tmp_path / "b", engine, *judges, "reward.model.tensor_parallel_size=2")
    plain, both = run_ranks(step_with_omni, 2, alone, timeout=100), run_ranks(step_with_omni, 2, judged, timeout=200)
    for without, with_judge in zip(plain, both, strict=True):
        assert torch.equal(with_judge["images"], without["images"])
        assert torch.equal(with_judge["reward"], without["reward"])
        for key, weight in without["weights"].items():
            assert torch.equal(with_judge["weights"][key], weight), key
