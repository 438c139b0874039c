"""The guard on old log-probs: if the replay differs from the rollout, the policy recomputes them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from phalanx.types import Each, Prompt, Samples
from tests.helpers.checks import heard
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import WordRollout, build, word_config


class Off(WordRollout):
    """Claims to be exact but is not, as with kernels that round differently in another pass."""

    error = 0.03

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        samples = super().sample(prompts, seed=seed, step=step, each=each)
        return replace(samples, log_prob=samples.log_prob + self.error)


def train(cfg: Any, error: float) -> tuple[bool, list[str]]:
    t = build(cfg)
    t.collector.rollout = Off(t.policy, cfg, t.collector.rollout.micro_batch_size)
    t.collector.rollout.error = error
    said = heard("phalanx.training.rescorer")
    t.fit()
    return t.job.progress.rescoring, said


@pytest.mark.parametrize(("error", "rescored"), [(0.03, True), (0.01, False)])
def test_an_error_of_a_tenth_of_the_clip_range(error: float, rescored: bool, tmp_path: Path) -> None:
    (known, said), (_, quiet) = run_ranks(train, 2, word_config(tmp_path, "trainer.total_training_steps=3"), error)
    assert known == rescored and len(said) == rescored and quiet == []  # once, by one rank
    if rescored:
        assert (
            "more than a tenth of the clip range 0.2 of algorithm.name=" in said[0]
            and "recomputes the old log-probs" in said[0]
        )
    rows = read_metrics(tmp_path / "out" / METRICS_FILE)
    errors = [row["actor/first_ratio_error"] for row in rows if "actor/first_ratio_error" in row]
    assert errors[0] == pytest.approx(error, rel=0.05)
    if rescored:
        assert errors[1:] == [0, 0]
        assert [row["rollout/logprob_abs_diff_max"] for row in rows[-2:]] == pytest.approx([error] * 2, rel=1e-3)
    else:
        assert errors[1:] == pytest.approx([error] * 2, rel=0.05)


def test_a_resumed_run_still_knows(tmp_path: Path) -> None:
    run_ranks(train, 1, word_config(tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=1"), 0.03)
    run_ranks(train, 1, word_config(tmp_path, "trainer.total_training_steps=2", "trainer.save_freq=1"), 0.03)
    rows = read_metrics(tmp_path / "out" / METRICS_FILE)
    errors = [row["actor/first_ratio_error"] for row in rows if "actor/first_ratio_error" in row]
    assert errors[0] > 0.02 and errors[1] == 0
