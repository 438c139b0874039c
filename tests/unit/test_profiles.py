"""Profiles of training steps: their files and contents, and that steps without a profile cost nothing."""

import gzip
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.run import TrainerConfig
from phalanx.distributed.mesh import World
from phalanx.run.rl import build
from phalanx.run.telemetry.profiles import Profiler
from phalanx.run.world import stop_world
from phalanx.telemetry.timers import Timers
from phalanx.tools.board.report import write_report
from tests.helpers.jobs import rows, tiny_config
from tests.helpers.roles import run_roles

MODULE = "phalanx.run.telemetry.profiles"
SMALL = (
    "model.cpu_linear=torch",
    "data.train_batch_size=2",
    "actor.ppo_mini_batch_size=2",
    "rollout.n=2",
    "rollout.num_inference_steps=3",
)


def trace(folder: Path, step: int, rank: int = 0) -> list[dict[str, Any]]:
    """The events of a trace."""
    with gzip.open(folder / "profiles" / f"step_{step:06d}" / f"rank_{rank}.json.gz") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


@pytest.mark.full
def test_a_step_of_a_job(
    sd3_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "phalanx")
    keys = (*SMALL, "trainer.total_training_steps=3")
    sys.modules.pop(MODULE, None)
    build(tiny_config(sd3_folder, tmp_path / "plain", *keys)).run()
    assert MODULE not in sys.modules
    build(tiny_config(sd3_folder, tmp_path / "profiled", *keys, "trainer.profile_steps=[2]")).run()
    out = tmp_path / "profiled" / "out"
    assert rows(out) == rows(tmp_path / "plain" / "out")  # to the last bit

    (folder,) = (out / "profiles").iterdir()
    assert folder.name == "step_000002"
    assert sorted(file.name for file in folder.iterdir()) == ["rank_0.json.gz", "rank_0.txt"]
    assert f"the profile of step 2 is in {folder}" in caplog.text
    assert "USDT" not in capfd.readouterr().err
    events = trace(out, 2)
    phases = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    assert phases["rollout"] == 1 and phases["reward"] == 1 and phases["update"] == 2
    kinds = {event["cat"] for event in events if event.get("name") == "aten::addmm"}
    assert kinds == {"cpu_op"}
    head, table = (folder / "rank_0.txt").read_text().split("\n", 1)
    assert head == "Step 2, rank 0 of 1 (actor), sorted by self_cpu_time_total."
    assert "There is no memory snapshot" in table and table.count("aten::") > 10
    assert (
        "Step 2 was profiled on 1 rank: ui.perfetto.dev opens the traces in profiles/step_000002."
        in write_report(out).read_text()
    )


@pytest.mark.full
def test_ranks_with_roles(sd3_folder: Path, tmp_path: Path) -> None:
    keys = ("placement={rollout: 0, actor: 1}", "trainer.total_training_steps=1", "trainer.profile_steps=[1]")
    run_roles(build, 2, tiny_config(sd3_folder, tmp_path, *keys, *SMALL))
    phases = []
    for rank in (0, 1):
        events = trace(tmp_path / "out", 1, rank)
        phases.append({event["name"] for event in events if event.get("cat") == "user_annotation"})
    assert "rollout" in phases[0] and "update" not in phases[0]
    assert "update" in phases[1] and "wait" in phases[1] and "rollout" not in phases[1]


def test_the_phases_of_a_joint_run_have_the_names_of_its_policies(world: World, tmp_path: Path) -> None:
    timers = Timers()
    timers.profiler = Profiler(TrainerConfig(output_dir=str(tmp_path), profile_steps=[3]), world, timers)
    writer = Timers(part="writer", whole=timers)
    with timers.training_step(3), writer("rollout"):
        torch.ones(1000).exp()
    events = trace(tmp_path, 3)
    assert [event["name"] for event in events if event.get("cat") == "user_annotation"] == ["writer_rollout"]
    assert {"aten::exp", "[memory]"} <= {event.get("name") for event in events}


def test_a_step_that_an_error_ends_has_no_files(world: World, tmp_path: Path) -> None:
    timers = Timers()
    timers.profiler = Profiler(TrainerConfig(output_dir=str(tmp_path), profile_steps=[1, 2]), world, timers)
    with pytest.raises(ZeroDivisionError), timers.training_step(1):
        _ = 1 / 0
    with timers.training_step(2):  # the profiler of step 1 has ended
        torch.ones(2).sum()
    assert [folder.name for folder in (tmp_path / "profiles").iterdir()] == ["step_000002"]


@pytest.fixture
def left() -> Iterator[None]:
    """Clean up the process groups of jobs that are built but do not run."""
    yield
    stop_world()


@pytest.mark.long
@pytest.mark.usefixtures("left")
def test_steps_that_a_run_does_not_take(sd3_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ("trainer.total_training_steps=null", "trainer.total_epochs=1", "trainer.profile_steps=[1,3]")
    with pytest.raises(ValueError, match=r"^trainer\.profile_steps: 3 is beyond the last step; expected 1 to 2$"):
        build(tiny_config(sd3_folder, tmp_path, *keys))

    def config(steps: str) -> Any:
        last = f"trainer.total_training_steps={steps}"
        return tiny_config(
            sd3_folder, tmp_path, *SMALL, last, "trainer.save_freq=1", f"trainer.profile_steps=[{steps}]"
        )

    build(config("1")).run()
    caplog.clear()
    cfg = config("2")
    cfg.trainer.profile_steps = [1, 2]
    build(cfg)
    assert "trainer.profile_steps: [1] are not profiled, since the run resumes after step 1" in caplog.text
