"""A signal in the middle of an update: the step is dropped, or finished if it has changed weights of which no copy was
kept, and the resumed run is the run.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.exit import Stopped
from phalanx.run.telemetry.rank_files import RankFiles
from phalanx.training.stops import SHUTDOWN
from tests.helpers.checks import heard
from tests.helpers.jobs import full_weights, rows, tiny_config
from tests.helpers.lm import tiny_lm_config
from tests.helpers.ranks import run_ranks

KEYS = ("trainer.save_freq=50", "trainer.total_training_steps=3")


def told(build: Callable[[Any], Any], cfg: Any, at: int) -> tuple[str, int, dict[str, Tensor], list[str]]:
    """Train; on rank 1 a signal arrives within pass `at` (from 1) that an update runs. Returns what the job says at its
    end, the passes done, the weights, and the warnings.
    """
    trainer, passes, warnings = build(cfg), 0, heard("phalanx")
    assert trainer.world.size == 2
    plain = trainer.updater.algorithm.loss

    def loss(*args: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == at and trainer.world.rank == 1:
            trainer.world.watch.stop = signal.SIGTERM
        return plain(*args)

    trainer.updater.algorithm.loss = loss
    end, job = "", trainer.job
    with RankFiles(job.output_dir, job.world, job.timers, job.total_steps) as job.rank_files:
        try:
            job._run_loop(trainer.fit, None)
        except Stopped as stop:
            end = str(stop)
    return end, passes, full_weights(trainer.policy.trained.parameters), warnings


def check(
    told_job: Callable[[Any, int], Any], config: Callable[[Path], Any], folder: Path, *, undoes: bool = False
) -> list[list[str]]:
    """Tell a job to stop in the first of the 2 optimizer steps of training step 2, and again in the second one, which
    it `undoes` or finishes. Returns the warnings of rank 0 in the whole run and in these two.
    """
    whole, parts = config(folder / "whole"), config(folder / "parts")
    ends = run_ranks(told_job, 2, whole, 0), run_ranks(told_job, 2, parts, 5), run_ranks(told_job, 2, parts, 3)
    _, passes, weights, _ = ends[0][0]
    assert passes == 12
    for end, passes, _, _ in ends[1]:
        assert passes == 5 and end.startswith("stopped by SIGTERM after step 1 of 3; the same command resumes from ")
    for end, passes, _, _ in ends[2]:
        assert passes == (3 if undoes else 4)
        assert end.startswith(
            f"stopped by SIGTERM after step {1 if undoes else 2} of 3; the same command resumes from "
        )
    _, passes, resumed, _ = run_ranks(told_job, 2, parts, 0)[0]
    assert passes == (8 if undoes else 4)
    assert rows(folder / "parts" / "out") == rows(folder / "whole" / "out")
    for name, value in weights.items():
        assert torch.equal(value, resumed[name]), name
    return [ranks[0][3] for ranks in ends]


def flow(cfg: Any, at: int) -> Any:
    from phalanx.run.rl import build

    return told(build, cfg, at)


def text(cfg: Any, at: int) -> Any:
    from phalanx.run.rl import build

    return told(build, cfg, at)


@pytest.mark.full
@pytest.mark.seldom("false")
@pytest.mark.parametrize("undo", ["null", "false"])
def test_a_stop_within_an_update(undo: str, sd3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's patience is 0 s here: one warning says so, after the first step that ended."""
    monkeypatch.setenv(SHUTDOWN, "0")
    keys = (*KEYS, "model.lora_rank=4", "actor.ema.decay=0.9")
    keys += ("parallel.fsdp_size=2", f"trainer.undo_steps={undo}")
    found = check(flow, lambda folder: tiny_config(sd3_folder, folder, *keys), tmp_path, undoes=undo == "null")
    warned = [[line for line in lines if "a signal to stop would have had to wait" in line] for lines in found]
    assert list(map(len, warned)) == [1, 1, 0 if undo == "null" else 1]
    assert warned[1][0].startswith("step 1: ") and "GRACE_S=0: raise it" in warned[1][0]


@pytest.mark.long
def test_what_a_critic_has_learned_is_a_change(lm_folder: Path, tmp_path: Path) -> None:
    """The policy's first update follows one of the critic."""
    for undo, done, step in (("null", 8, 2), ("true", 5, 1)):
        keys = (*KEYS, "algorithm.name=ppo", f"trainer.undo_steps={undo}")
        for end, passes, _, _ in run_ranks(text, 2, tiny_lm_config(lm_folder, tmp_path / undo, *keys), 5):
            assert passes == done and end.startswith(f"stopped by SIGTERM after step {step} of 3; ")


@pytest.mark.long
def test_partial_rollouts_that_stop_within_an_update(lm_folder: Path, tmp_path: Path) -> None:
    """The checkpoint has the responses that waited before the step, which then draws the same tokens again."""
    keys = ("rollout.partial_rollout=true", "rollout.partial_rollout_tokens=4", "rollout.max_staleness=2")
    keys += ("rollout.correction=token_tis", "data.max_response_length=24")
    check(text, lambda folder: tiny_lm_config(lm_folder, folder, *KEYS, *keys), tmp_path)
