"""Timers, metrics.jsonl, and the summary of a run."""

import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_logger import RunLogger
from phalanx.run.validation import validation_summary
from phalanx.telemetry.step_metrics import reward_by_turns
from phalanx.telemetry.timers import Timers
from tests.helpers.logs import records, rows, start, trainer

SRC = Path(__file__).parents[2] / "src"


class TestTimers:
    def test_phases_add_up_and_pop_starts_anew(self) -> None:
        timers = Timers()
        for _ in range(2):
            with timers("rollout"):
                time.sleep(0.02)
        with timers("update"):
            pass
        timers.add("reward", 1.5)
        seconds = timers.pop()
        assert list(seconds) == ["time/rollout", "time/update", "time/reward"]
        assert seconds["time/rollout"] >= 0.04 and seconds["time/update"] > 0
        assert seconds["time/reward"] == 1.5
        assert timers.pop() == {}

    def test_a_phase_that_raises_is_counted(self) -> None:
        timers = Timers()
        with pytest.raises(KeyError), timers("rollout"):
            time.sleep(0.01)
            raise KeyError
        assert timers.pop()["time/rollout"] >= 0.01


class TestMetricsFile:
    def test_rows_are_strict_json_and_step_comes_first(self, tmp_path: Path) -> None:
        with start(tmp_path) as log:
            log.log(0, {"val/ocr/reward/mean": 0.5})
            log.log(1, {"reward/mean": float("nan"), "actor/lr": float("inf"), "n": 3, "x": np.float32(0.25)})
            # Each row is written immediately.
            assert rows(tmp_path)[1] == {"step": 1, "reward/mean": None, "actor/lr": None, "n": 3, "x": 0.25}
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert lines[0].startswith('{"step": 0, "val/ocr/reward/mean": 0.5, "perf/elapsed_s": ')
        assert len(lines) == 2

    def test_a_run_that_resumes_before_its_first_row_keeps_the_validation(self, tmp_path: Path) -> None:
        """The row of step 1 is written again, the one of step 0 is not."""
        with start(tmp_path) as log:
            log.log(0, {"val": 1})
            log.log(1, {"x": 1})
        RunLogger(trainer(tmp_path), {}, {}, 0, 4, True, resumes=True).close()
        assert rows(tmp_path) == [{"step": 0, "val": 1}]
        RunLogger(trainer(tmp_path), {}, {}, 0, 4, True).close()
        assert rows(tmp_path) == []

    def test_a_resumed_run_drops_what_it_will_repeat(self, tmp_path: Path) -> None:
        with start(tmp_path) as log:
            for step in range(4):
                log.log(step, {"x": step})
        with start(tmp_path, step=2) as log:
            assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
            log.log(3, {"x": 30})
            log.log(4, {"x": 40})
        assert [(row["step"], row["x"]) for row in rows(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]

    def test_a_new_run_drops_all(self, tmp_path: Path) -> None:
        with start(tmp_path) as log:
            log.log(0, {"x": 1})
            log.log(7, {"x": 1})
        with start(tmp_path) as log:
            log.log(1, {"x": 2})
        assert rows(tmp_path) == [{"step": 1, "x": 2}]

    def test_a_half_written_last_line_is_mended(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x"')
        with start(tmp_path, step=2) as log:
            log.log(3, {"x": 3})
        assert rows(tmp_path) == [{"step": 1, "x": 1}, {"step": 3, "x": 3}]
        assert caplog.records == []

    def test_another_broken_line_is_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n\nnonsense\n{"x": 1}\n{"step": 2}\n')
        with caplog.at_level(logging.WARNING):
            assert read_metrics(path) == [{"step": 1}, {"step": 2}]
        assert caplog.messages == [
            f"{path}:{line}: not a JSON object with a step; the line is ignored" for line in (3, 4)
        ]

    def test_steps_only_grow(self, tmp_path: Path) -> None:
        with start(tmp_path) as log:
            log.log(3, {"x": 1})
        with start(tmp_path, step=3) as log, pytest.raises(AssertionError, match="row of step 3 after one of step 3"):
            log.log(3, {"x": 1})

    def test_the_clock_goes_on_after_a_resume(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "perf/elapsed_s": 100.0}\n')
        with start(tmp_path, step=1) as log:
            log.log(2, {})
        assert 100 <= read_metrics(tmp_path / "metrics.jsonl")[-1]["perf/elapsed_s"] < 200

    def test_other_ranks_write_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "run"
        with start(folder, "console", "tensorboard", "wandb", ids={"wandb": "abc"}, enabled=False) as log:
            log.log(1, {"reward/mean": 1})
            log.log(1, {"reward/mean": 1})
            log.records(1, "ocr", records())
            assert log.ids == {"wandb": "abc"}
        assert not folder.exists()
        assert capsys.readouterr() == ("", "")


def test_the_summary_of_a_single_validation_has_no_arrow(tmp_path: Path) -> None:
    rows = [{"step": 0, "val/a/reward/mean": 0.25}, {"step": 5, "reward/mean": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert validation_summary(tmp_path) == ["val/a/reward/mean: 0.250 (step 0)"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "val/a/reward/mean": 0.5}) + "\n")
    assert validation_summary(tmp_path) == ["val/a/reward/mean: 0.250 (step 0) -> 0.500 (step 9)"]


def test_rewards_by_turns() -> None:
    """Only samples with a reward count; many turns share a metric, and numbers of turns without samples have none."""
    reward = torch.tensor([1.0, 2.0, 4.0, torch.nan, 8.0, 0.5, 1.5, torch.nan])
    turns = torch.tensor([1, 3, 3, 3, 0, 9, 12, 5])
    assert reward_by_turns(reward, turns) == {
        "conversation/reward_turns_0": 8.0,
        "conversation/reward_turns_1": 1.0,
        "conversation/reward_turns_3": 3.0,
        "conversation/reward_turns_more": 1.0,
    }
