"""Warnings about runs that learn nothing: when they are given, and that each is given once."""

import logging
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.telemetry.advice import PATIENCE, SAME_STEPS, Advisor
from phalanx.telemetry.timers import is_training_row
from tests.helpers.logs import start

LEARNS = {"reward/mean": 0.5, "reward/std": 0.25, "reward/max": 1.0, "reward/min": 0.0, "reward/zero_std_ratio": 0.25}
LEARNS |= {"actor/grad_norm": 0.5, "actor/lr": 1e-4, "actor/updates_skipped": 0.0}


def warnings_of(steps: int, row: dict[str, Any], total: int = 100, samples: int = 8) -> list[str]:
    """The warnings about a run whose rows are equal except for the mean reward."""
    advisor, lines = Advisor(total, samples, 64), []
    for step in range(1, steps + 1):
        lines += advisor.warnings(step, LEARNS | {"reward/mean": 0.5 + step / 1000} | row)
    return lines


def test_a_run_that_learns_gets_none() -> None:
    assert warnings_of(50, {"response/truncated_ratio": 0.99}) == []


def test_responses_that_are_all_cut() -> None:
    (line,) = warnings_of(30, {"response/truncated_ratio": 1.0})
    assert line == (
        "all responses of step 1 are cut at data.max_response_length=64, before their end of sequence: raise it, or "
        "reward shorter responses"
    )


@pytest.mark.parametrize("total", [3, 100])
def test_one_reward_for_all_samples(total: int) -> None:
    flat = {"reward/max": 0.0, "reward/min": 0.0, "reward/zero_std_ratio": 1.0, "reward/mean": 0.0, "reward/std": 0.0}
    steps = min(PATIENCE, total)
    assert warnings_of(total, flat, total) == [
        f"the reward is 0 for every sample of the last {steps} steps, up to step {steps}: there is nothing to learn from"
    ]
    assert warnings_of(steps - 1, flat, total) == []


def test_rewards_of_the_data_may_be_equal() -> None:
    """Those of pairs are 1 and 0 in each step, and those of right responses 1."""
    flat = {"reward/max": 1.0, "reward/min": 1.0, "reward/zero_std_ratio": 1.0, "reward/mean": 1.0, "reward/std": 0.0}
    for row in ({"reward/mean": 0.5}, flat):
        assert warnings_of(30, row, samples=0) == []


def test_no_group_differs() -> None:
    row = {"reward/zero_std_ratio": 1.0}
    (line,) = warnings_of(30, row)
    assert line.startswith(f"no prompt's samples differ in reward in the last {PATIENCE} steps, up to step {PATIENCE}")
    assert warnings_of(30, row, samples=1) == []  # there is no other sample to differ from
    assert warnings_of(30, row | {"critic/lr": 1e-4}) == []  # advantages come from the critic


@pytest.mark.parametrize(
    ("row", "reason"), [({"actor/grad_norm": 0.0}, "the gradient is 0"), ({"actor/lr": 0.0}, "the learning rate is 0")]
)
def test_nothing_is_updated(row: dict[str, Any], reason: str) -> None:
    lines = warnings_of(30, row)
    assert lines == [f"no weight was updated in the last {PATIENCE} steps, up to step {PATIENCE}: {reason}"]


def test_no_sample_is_trained() -> None:
    advisor = Advisor(2, 8, None)
    row = {"reward/mean": 0.5, "actor/updates_skipped": 1.0}
    assert advisor.warnings(1, row) == []
    assert advisor.warnings(2, row) == [
        "no weight was updated in the last 2 steps, up to step 2: every sample was left out of the update"
    ]
    assert Advisor(1, 8, None).warnings(1, row | {"critic/lr": 1.0}) == []  # the critic's warm-up


def test_a_mean_reward_that_stays_to_the_last_bit() -> None:
    advisor, lines = Advisor(100, 8, None), []
    for step in range(1, 31):
        lines += advisor.warnings(step, LEARNS)
    (line,) = lines
    assert line.startswith(f"reward/mean is 0.5 in each of the last {SAME_STEPS} steps, up to step {SAME_STEPS}:")


def test_a_step_with_a_signal_begins_the_count_anew() -> None:
    advisor = Advisor(100, 8, None)
    for step in range(1, 30):
        ratio = 0.5 if step % PATIENCE == 0 else 1.0
        assert advisor.warnings(step, LEARNS | {"reward/mean": step, "reward/zero_std_ratio": ratio}) == []


def test_policies_of_a_joint_run() -> None:
    """The metrics of writer and painter, which may train alternately, are checked separately."""
    writer, painter = Advisor(100, 8, 64, "writer"), Advisor(100, 2, 64, "painter")
    even = {f"writer/{key}": value for key, value in LEARNS.items()}
    odd = {f"painter/{key}": value for key, value in LEARNS.items() if not key.startswith("reward/")}
    lines = []
    for step in range(1, 2 * PATIENCE + 1):
        row = {"reward/mean": step, "reward/std": 0.5, "reward/max": 1.0, "reward/min": 0.0}
        row |= even | {"writer/reward/mean": step, "writer/response/truncated_ratio": float(step == 1)}
        row |= odd | {"painter/actor/grad_norm": 0.0} if step % 2 else {}
        lines += [*writer.warnings(step, row), *painter.warnings(step, row)]
    cut, idle = lines
    assert cut.startswith("writer: all responses of step 1 are cut at data.max_response_length=64")
    assert idle.startswith(f"painter: no weight was updated in the last {PATIENCE} steps, up to step")


def test_a_validation_is_no_step() -> None:
    assert not is_training_row({"step": 0, "val/a/reward/mean": 1.0, "time/validation": 1.0, "perf/elapsed_s": 1.0})
    assert is_training_row({"step": 1, "train/loss": 1.0})


def test_the_job_says_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), start(tmp_path) as log:
        for step in range(1, 5):
            log.log(step, {"response/truncated_ratio": 1.0, "actor/grad_norm": 0.5})
    (line,) = caplog.messages
    assert line.startswith("all responses of step 1 are cut at data.max_response_length, before their end of sequence")
