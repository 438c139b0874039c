"""Sweeps: every run equals its run alone, in passes that they share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.jobs import full_weights, rows, tiny_config
from tests.helpers.ranks import run_ranks

LORA = ("model.lora_rank=4", "model.lora_alpha=8", "parallel.fsdp_size=1", "trainer.save_freq=1")


def weights_of(job: Any) -> dict[str, torch.Tensor]:
    return full_weights(job.policy.trained.parameters)


def train(cfg: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of each run of a sweep, or of the run."""
    from phalanx.run.rl import build
    from phalanx.run.sweep import built

    job = built(build, cfg)
    job.run()
    jobs = dict(zip(cfg.runs, job.jobs, strict=True)) if cfg.runs else {"": job}
    return {name: weights_of(each) for name, each in jobs.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_runs_equal_those_alone(sd3_folder: Path, tmp_path: Path, ranks: int) -> None:
    keys = (*LORA, "actor.ema={decay: 0.5}")
    cfg = tiny_config(sd3_folder, tmp_path, *keys, "sweep.optim.lr=[1e-3,4e-3]", "sweep.trainer.seed=[0,3]")
    together = run_ranks(train, ranks, cfg)
    for name in cfg.runs:
        words = [word.replace("=", "=", 1) for word in name.split(",")]
        alone = tiny_config(sd3_folder, tmp_path, *keys, *words, f"trainer.output_dir={tmp_path / 'alone' / name}")
        [expected] = run_ranks(train, ranks, alone)[0].values()
        for key, value in expected.items():
            torch.testing.assert_close(together[0][name][key], value, rtol=0, atol=0)
        assert rows(tmp_path / "out" / name) == rows(tmp_path / "alone" / name), name
