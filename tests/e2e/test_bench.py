"""The command of the benchmark: whole steps of the real Trainer on random weights, on two ranks."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.helpers.tasks import run_task

CONFIG = "benchmarks/cpu_reference.yaml"
LM = "configs/grpo/gsm8k_qwen25_0_5b.yaml"
TINY = [
    "rollout.height=32",
    "rollout.width=32",
    "rollout.num_inference_steps=3",
    "data.max_prompt_length=8",
    "data.train_batch_size=2",
    "rollout.n=4",
    "rollout.micro_batch_size_per_gpu=4",
    "actor.ppo_mini_batch_size=1",
    "parallel.fsdp_size=2",
]


@pytest.mark.long
def test_a_step_is_measured_on_two_ranks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ["--shapes", "tiny_sd3", "--steps", "2", "--profile", trace]
    done = run_task(["benchmarks/step.py", CONFIG, *options, *TINY], nproc=2, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "images/s" in done.stdout
    r = json.loads(done.stdout.strip().splitlines()[-1])
    assert (r["images"], r["trained_steps"], r["ranks"], r["steps"]) == (8, 2, 2, 2)
    assert 0 < r["decode_s"] < r["rollout_s"]
    assert 0 < r["optimizer_s"] < r["update_s"]
    phases = r["rollout_s"] + r["reward_s"] + r["update_s"]  # medians of two steps are means, which add up
    assert 0.5 * r["step_s"] < phases <= r["step_s"]
    assert r["images_per_s"] == pytest.approx(8 / r["step_s"])
    assert 0 < r["mfu"] <= r["hfu"] < 1
    assert 0.1 < r["peak_memory_gb"] < 4
    assert math.isfinite(r["grad_norm"]) and r["grad_norm"] > 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event}
    assert any("scaled_dot_product" in name for name in names)


def test_a_shape_that_is_unknown_is_told_in_one_line() -> None:
    done = run_task(["benchmarks/step.py", CONFIG, "--shapes", "huge"])
    assert done.returncode != 0
    assert (
        "error: model.path: 'huge' is not in benchmarks/shapes.py; "
        "known: sd35_medium, sd3_cpu, tiny_sd3, qwen_image, tiny_qwen_image\n"
    ) in done.stderr


@pytest.mark.full
def test_a_step_of_a_language_model_is_measured() -> None:
    keys = ["data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "data.max_response_length=12", "rollout.n=2"]
    done = run_task(["benchmarks/step.py", LM, "--shapes", "tiny_lm/1", "--steps", "1", "--warmup", "0", *keys])
    assert done.returncode == 0, done.stderr
    r = json.loads(done.stdout.strip().splitlines()[-1])
    assert (r["responses"], r["dtype"], r["first_ratio_error"]) == (8, "bfloat16", 0)
    assert "responses/s" in done.stdout and "ms a token" in done.stdout
    assert r["ms_per_pass"] == pytest.approx(1e3 * r["rollout_s"] / 12)
    assert r["decoded_per_rank_per_s"] == pytest.approx(8 * r["response_tokens"] / r["rollout_s"])
    assert 0 < r["mfu"] <= r["hfu"] < 1 and r["grad_norm"] > 0


def test_a_language_model_that_is_unknown_is_told_in_one_line() -> None:
    done = run_task(["benchmarks/step.py", LM, "--shapes", "Qwen/Nothing"])
    assert done.returncode == 2
    assert (
        done.stderr == "error: --shapes: model.path: 'Qwen/Nothing': no such folder, and no hub has it within reach\n"
    )


def test_the_baseline_runs_in_turns_with_the_trainer() -> None:
    done = run_task(
        ["benchmarks/baseline.py", CONFIG, "--shapes", "tiny_sd3", "--steps", "1", "--warmup", "0", *TINY[:-1]]
    )
    assert done.returncode == 0, done.stderr
    r = json.loads(done.stdout.strip().splitlines()[-1])
    sums = {who: sum(r[f"{who}_wall_s"]) for who in ("phalanx", "baseline")}
    assert min(*r["phalanx_cpu_s"], *r["baseline_cpu_s"]) > 0
    assert r["ratio_wall"][2] == pytest.approx(sums["baseline"] / sums["phalanx"])


@pytest.mark.full
def test_passes_of_a_family_are_timed_here_and_in_diffusers() -> None:
    done = run_task(["benchmarks/families.py", "qwen_image_21", "--runs", "1", "--no-docs"])
    assert done.returncode == 0, done.stderr
    row = re.fullmatch(r"\| `qwen_image_21` \| (\d+) \| (\d+) \| (\S+) \|", done.stdout.splitlines()[-1])
    assert row is not None, done.stdout
    here, there, ratio = map(float, row.groups())
    assert min(here, there) > 0 and ratio == pytest.approx(there / here, rel=0.2)


def test_the_check_of_a_weight_sync_is_measured_beside_it() -> None:
    """The tiny model joins projections, and the check finds all of its tensors."""
    done = run_task(["benchmarks/sync_check.py", "--rounds", "1"])
    assert done.returncode == 0, done.stderr
    r = json.loads(done.stdout.strip().splitlines()[-1])
    assert (r["tensors"], r["rounds"]) == (35, 1) and r["copied_cpu_s"] > 0 and r["copied_and_checked_cpu_s"] > 0
