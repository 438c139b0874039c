"""examples/*.py run, and the one-file loops take the job's steps; the number of files of the job's own step."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.flow import FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.run import rl
from phalanx.run.rules import load_config
from tests.helpers.jobs import rows
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import ROOT, run_ranks

LINE = re.compile(r"step (\d+): reward (\S+), ratio_error (\S+), grad_norm (\S+)")
FLOW = ("data.train_batch_size=2", "rollout.n=8", "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=4")
TEXT = ("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "actor.ppo_micro_batch_size_per_gpu=8")
ONE_UPDATE = ("trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.logger=[]")


def fit(kind: str, config: str, overrides: list[str]) -> None:
    os.chdir(ROOT)
    if kind == "flowgrpo":
        rl.build(load_config(FlowRLConfig, config, overrides)).fit()
    else:
        rl.build(load_config(LMRLConfig, config, overrides)).fit()


def run_example(name: str, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, f"examples/{name}.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.seldom("flowgrpo")
@pytest.mark.full
@pytest.mark.parametrize(("kind", "keys"), [("flowgrpo", FLOW), ("grpo", TEXT)], ids=["flowgrpo", "grpo"])
def test_a_loop_in_one_file_takes_the_jobs_steps(kind: str, keys: tuple[str, ...], tmp_path: Path) -> None:
    config = f"configs/{kind}/quickstart.yaml"
    if kind == "grpo":  # a reward that differs between responses
        (tmp_path / "length.py").write_text(
            "def length(completions, prompts, metadata):\n    return [len(c) for c in completions]\n"
        )
        keys += (f"reward.functions=[{{path: '{tmp_path}/length.py:length'}}]",)
    else:
        keys += ("actor.ema.decay=null", "reward.functions=[{name: jpeg_compressibility}]")
    common = [*keys, *ONE_UPDATE, "trainer.val_before_train=false"]
    text = run_example(f"{kind}_in_one_file", config, *common, f"trainer.output_dir={tmp_path / 'file'}")
    run_ranks(fit, 1, kind, config, [*common, f"trainer.output_dir={tmp_path / 'job'}"])
    steps, job = LINE.findall(text), rows(tmp_path / "job")
    assert len(steps) == len(job) == 2
    for (_, reward, error, norm), row in zip(steps, job, strict=True):
        assert float(norm) == pytest.approx(row["actor/grad_norm"], rel=1e-5) and float(norm) > 0
        assert float(reward) == pytest.approx(row["reward/mean"], abs=1e-4)
        assert float(error) == 0


def test_a_reward_and_an_algorithm_of_ones_own(lm_folder: Path, tmp_path: Path) -> None:
    keys = [f"algorithm.name={ROOT}/examples/my_algorithm.py", "algorithm.scale=2"]
    keys += [f"reward.functions=[{{path: '{ROOT}/examples/my_reward.py:short_answer', kwargs: {{most_words: 1}}}}]"]
    cfg = tiny_lm_config(lm_folder, tmp_path, *keys, "actor.ppo_mini_batch_size=4")
    run_ranks(fit_lm, 1, cfg)
    for row in rows(tmp_path / "out"):
        assert 0 < row["reward/mean"] <= 1 and row["actor/log_prob"] < 0
        assert row["actor/first_ratio_error"] == 0  # reported by every token-level algorithm


def fit_lm(cfg: Any) -> None:
    rl.build(cfg).fit()


@cache
def step_files(kind: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "benchmarks/step_files.py", "--list", kind]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.seldom("text-34")
@pytest.mark.full
@pytest.mark.parametrize(("kind", "most"), [("flow", 34), ("text", 34)])
def test_a_step_runs_through_few_files(kind: str, most: int) -> None:
    """So that a reader can follow a step: at most seven of the core's files are in training/, and three are about the
    job.
    """
    text = step_files(kind)
    files, of_loop, of_job = map(
        int, re.findall(rf"{kind}: (\d+) files of the core, (\d+) .* and (\d+) of run/", text)[0]
    )
    assert "training/loop.py: " in text and "training/update.py: " in text
    assert files <= most and of_loop <= 7 and of_job <= 3, text


@pytest.mark.seldom("text-12")
@pytest.mark.full
@pytest.mark.parametrize(("kind", "most"), [("flow", 13), ("text", 12)])
def test_a_reward_that_is_a_function_meets_few_others(kind: str, most: int) -> None:
    """Of three files, on all threads; images are also searched for NaN. Splitting, blame and forgiving are apart."""
    text = step_files(kind)
    functions, files = map(int, re.findall(r"meets (\d+) functions in (\d+) files of rewards/", text)[0])
    assert functions <= most and files <= 3, text
    assert "reward: rewards/call.py: _run_tasks, as_numbers" in text  # those on the thread


@pytest.mark.full
@pytest.mark.parametrize(("name", "steps"), [("text", 40), ("images", 30)], ids=["text", "images"])
def test_a_notebook_runs_from_top_to_bottom(name: str, steps: int, tmp_path: Path) -> None:
    """Its cells, with two steps in place of its own; the script's folder is not the checkout."""
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "\n".join(texts).count(f"STEPS = {steps}\n") == 1
    (tmp_path / "cells.py").write_text("\n".join(texts).replace(f"STEPS = {steps}\n", "STEPS = 2\n"))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "cells.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "outputs" / "notebooks"
    assert [row["step"] for row in rows(kept / name)] == [0, 1, 2]
    assert len(list((tmp_path / "outputs" / "evaluation").glob("*/evaluation.json"))) == (2 if name == "text" else 1)
    colab = next("".join(cell["source"]) for cell in cells if "## On Colab" in "".join(cell["source"]))
    assert "%pip install -e '.[" in colab and "`float32`" in colab


@pytest.mark.parametrize(
    ("gpu", "bfloat16", "dtype"), [(False, False, "float32"), (True, False, "float32"), (True, True, "bfloat16")]
)
@pytest.mark.parametrize("name", ["text", "images"])
def test_a_notebook_chooses_what_the_device_computes_in(
    name: str, gpu: bool, bfloat16: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU such as a T4 says that it supports bfloat16, by emulation."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(
        "torch.cuda.is_bf16_supported", lambda including_emulation=True: bfloat16 or including_emulation
    )
    cells = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())["cells"]
    first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    values: dict[str, object] = {}
    exec(first, values)
    assert values["DTYPE"] == dtype
    assert sum('{"dtype": DTYPE}' in "".join(cell["source"]) for cell in cells) == 1
