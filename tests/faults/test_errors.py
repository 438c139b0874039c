"""The first error of the world, with rank, host and traceback, is the last thing on the terminal; nothing hangs."""

import re
import signal
import socket
from pathlib import Path

import pytest

from tests.faults.jobs import SHORT, Job, kill, killed, steps

HOST = socket.gethostname()
pytestmark = pytest.mark.full
SETTINGS = ("trainer.total_training_steps=500",)


def test_a_rank_that_raises(sd3_folder: Path, tmp_path: Path) -> None:
    with Job(sd3_folder, tmp_path, *SETTINGS, env={"FAULT": "raise:1:2"}) as job:
        assert job.wait() == 1
        said = job.said
    report = said[said.index(f"rank 1 on {HOST}:") :].splitlines()
    assert report[-1] == "KeyError: 'no such thing'"
    assert any('task.py", line' in line and line.endswith("in advantage") for line in report)
    assert said.count("Traceback (most recent call last)") == 1  # none of other ranks, and none of torchrun
    assert "Connection closed" not in said


def test_a_rank_that_hangs(sd3_folder: Path, tmp_path: Path) -> None:
    """The time limit ends the job, and the stack of the hanging rank is printed."""
    with Job(sd3_folder, tmp_path, *SETTINGS, SHORT, env={"FAULT": "hang:1:2"}) as job:
        assert job.wait() == 1
        assert f"stacks of rank 1 on {HOST}:" in job.said
        assert 'task.py", line' in job.said and "in advantage" in job.said  # where it hangs
        assert "Timed out waiting" in job.said
        assert steps(tmp_path) == [1, 2]


def test_a_rank_that_is_frozen_is_named(sd3_folder: Path, tmp_path: Path) -> None:
    """Not even its threads run. The launcher waits 30 s after SIGTERM before it kills the rank."""
    with Job(sd3_folder, tmp_path, *SETTINGS, SHORT, env={"PHASE_S": "0.1"}) as job:
        job.until(lambda: job.phase(1)[1] >= 1)
        kill(job.phase(1)[0], signal.SIGSTOP)
        assert job.wait() == 1
        assert f"lost rank 1 on {HOST}: no sign of life for " in job.said.splitlines()[-1]


@pytest.mark.long
def test_a_rank_that_is_killed_is_named(sd3_folder: Path, tmp_path: Path) -> None:
    with Job(sd3_folder, tmp_path, *SETTINGS, env={"PHASE_S": "0.1"}) as job:
        job.until(lambda: job.phase(1)[1] >= 1)
        kill(job.phase(1)[0], signal.SIGKILL)
        assert job.wait() == 137
        assert re.fullmatch(killed(1), job.said.splitlines()[-1])


EXIT = """
import os

def leave(images, prompts, metadata, rank, status):
    if rank in (-1, int(os.environ["RANK"])):
        os._exit(status)
    return [0.0] * len(prompts)
"""


@pytest.mark.parametrize(
    ("rank", "status", "ends", "last"),
    [
        pytest.param(1, 3, 3, "error: rank 1 on {host} ended with status 3, without a word", marks=pytest.mark.long),
        (0, 0, 1, "lost rank 0 on {host}: no sign of life for "),  # its launcher takes that for success
        pytest.param(1, 0, 1, "lost rank 1 on {host}: no sign of life for ", marks=pytest.mark.long),
        pytest.param(
            *(-1, 0, 1, "error: ranks 0, 1 on {host} ended with status 0 before their job was done"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_reward_that_ends_its_rank(  # -1: all ranks
    rank: int, status: int, ends: int, last: str, sd3_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(EXIT)
    kwargs = f"{{rank: {rank}, status: {status}}}"
    reward = f"reward.functions=[{{path: '{tmp_path}/rewards.py:leave', kwargs: {kwargs}}}]"
    with Job(sd3_folder, tmp_path, *SETTINGS, SHORT, reward) as job:
        assert job.wait() == ends
        assert job.said.splitlines()[-1].startswith(last.format(host=HOST))
        assert "Traceback" not in job.said
