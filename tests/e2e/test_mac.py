"""Jobs on what looks like a Mac (see tests/helpers/mac.py): quickstarts on the CPU, and what needs Linux is refused."""

from pathlib import Path

import pytest

from phalanx.run import launch
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from tests.helpers.ranks import ROOT
from tests.helpers.tasks import run_task

MAC = ROOT / "tests" / "helpers" / "mac.py"
QUICKSTARTS = {
    "grpo": ["data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "actor.ppo_micro_batch_size_per_gpu=32"],
    "flowgrpo": ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=8"],
}


@pytest.mark.parametrize("task", [pytest.param("grpo"), pytest.param("flowgrpo", marks=pytest.mark.full)])
def test_a_quickstart_trains(task: str, tmp_path: Path) -> None:
    """Two ranks sample, train, save and report as they do on Linux; chat templates lack some confinement, and say so."""
    keys = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    command = [MAC, f"tasks/train_{task}.py", f"configs/{task}/quickstart.yaml", *keys, *QUICKSTARTS[task]]
    done = run_task([*command, f"trainer.output_dir={tmp_path}"], nproc=2)
    assert done.returncode == 0, done.stderr
    [row] = read_metrics(tmp_path / METRICS_FILE)
    assert row["actor/first_ratio_error"] == 0
    assert 1e-5 < row["perf/peak_memory_gb"] < 0.02  # macOS counts bytes, and this machine in truth kilobytes
    assert (tmp_path / "report.html").is_file()
    if task == "grpo":
        lacking = "this machine has no seccomp and no Landlock and no limit of memory: chat templates run without that"
        assert lacking in done.stderr


def test_recovery_in_place_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It closes connections that /proc lists."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("IN_PLACE", "1")
    with pytest.raises(SystemExit) as end:
        launch.main(["--nnodes", "2", "tasks/train_grpo.py"])
    assert end.value.code == 2
    assert capfd.readouterr().err == "error: IN_PLACE=1 needs Linux, and this is darwin; leave it out\n"
