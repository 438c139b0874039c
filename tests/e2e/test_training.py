"""The real command, `sh train.sh tasks/train_flowgrpo.py ...`, on real torchruns."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.jobs import base_overrides, rows, tiny_config
from tests.helpers.ranks import LIMIT_S, ROOT, end_with_parent, launch_environment, torchrun, two_nodes
from tests.helpers.tasks import run_task

TASK = "tasks/train_flowgrpo.py"


def overrides(model: Path, folder: Path) -> list[str]:
    tiny_config(model, folder)  # writes the prompts
    return base_overrides(model, folder)


@pytest.mark.full
def test_quickstart_learns(tmp_path: Path) -> None:
    """In its first twelve steps, on two ranks, the held-out reward rises, and the report has both validations."""
    out = tmp_path / "run"
    done = torchrun(
        [
            TASK,
            "configs/flowgrpo/quickstart.yaml",
            "trainer.total_training_steps=12",
            "trainer.test_freq=12",
            f"trainer.output_dir={out}",
        ],
        nproc=2,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    metrics = rows(out)
    before, after = metrics[0], metrics[-1]
    assert [row["step"] for row in metrics] == list(range(13))
    assert 0.3 < before["val/held_out/reward/mean"] <= 0.62
    assert after["val/held_out/reward/mean"] > before["val/held_out/reward/mean"] + 0.05
    assert all(row["actor/first_ratio_error"] == 0.0 for row in metrics[1:])
    # the last output of the command
    assert f"val/held_out/reward/mean: {before['val/held_out/reward/mean']:.3f} (step 0) -> " in done.stdout
    assert f"report: {out / 'report.html'}" in done.stdout
    report = (out / "report.html").read_text()
    assert report.count("data:image/png;base64,") >= 16  # before and after
    assert "Content-Security-Policy\" content=\"default-src 'none'; img-src data:;" in report  # it loads nothing


@pytest.mark.full
def test_two_nodes_are_one_world(sd3_folder: Path, tmp_path: Path) -> None:
    """Two torchruns with one rank each, which differ only in NNODES and NODE_RANK, act as two ranks on one node."""
    fixed = ["parallel.fsdp_size=1", "rollout.micro_batch_size_per_gpu=4"]
    one = run_task([TASK, *overrides(sd3_folder, tmp_path / "one"), *fixed], nproc=2)
    assert one.returncode == 0, one.stderr
    nodes = two_nodes([TASK, *overrides(sd3_folder, tmp_path / "two"), *fixed], nproc=1)
    assert [node.returncode for node in nodes] == [0, 0], nodes[0].stderr + nodes[1].stderr
    assert rows(tmp_path / "one" / "out") == rows(tmp_path / "two" / "out")
    # only rank 0 prints
    assert "report:" in nodes[0].stdout and "report:" not in nodes[1].stdout


@pytest.mark.long
@pytest.mark.full
def test_killed_run_resumes_as_if_it_had_not_been(sd3_folder: Path, tmp_path: Path) -> None:
    args = ["trainer.total_training_steps=6", "trainer.save_freq=2", "model.lora_rank=4", "actor.ema.decay=0.9"]
    whole = run_task([TASK, *overrides(sd3_folder, tmp_path / "whole"), *args], nproc=2)
    assert whole.returncode == 0, whole.stderr

    command = ["sh", "train.sh", TASK, *overrides(sd3_folder, tmp_path / "cut"), *args]
    metrics = tmp_path / "cut" / "out" / "metrics.jsonl"
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=launch_environment({"NPROC_PER_NODE": "2"}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            assert time.monotonic() < deadline and run.poll() is None, "the run did not come to its third step"
            time.sleep(0.01)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        kill_ranks(tmp_path / "cut")
    assert len(rows(tmp_path / "cut" / "out")) < 6

    again = run_task([TASK, *overrides(sd3_folder, tmp_path / "cut"), *args], nproc=2)
    assert again.returncode == 0, again.stderr
    assert rows(tmp_path / "cut" / "out") == rows(tmp_path / "whole" / "out")


def kill_ranks(folder: Path) -> None:
    """Kill the ranks whose command line names the folder: torchrun starts ranks in separate sessions."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                line = (process / "cmdline").read_bytes().decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if str(folder) in line and TASK in line:
                os.kill(int(process.name), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.long), 2])
def test_exit_status_is_the_jobs(nproc: int, sd3_folder: Path, tmp_path: Path) -> None:
    reward = tmp_path / "bad.py"
    reward.write_text("def broken(images, prompts, metadata):\n    raise KeyError('no such key')\n")
    functions = f"reward.functions=[{{path: '{reward}:broken'}}]"
    done = torchrun([TASK, *overrides(sd3_folder, tmp_path), functions], nproc=nproc)
    assert done.returncode != 0
    said = "reward 'broken' raised KeyError: 'no such key' on the prompt"
    told = [line for line in done.stderr.splitlines() if said in line and line.startswith("error: ")]
    assert len(told) == 1
    assert said in done.stderr.splitlines()[-1]
