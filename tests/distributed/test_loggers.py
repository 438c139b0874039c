"""Loggers in resumed jobs: the example of a custom logger, and wandb with a checkpoint of an older version."""

import csv
import json
import os
from pathlib import Path

import pytest

from phalanx.config.run import RLConfig
from phalanx.run.checkpoint_folder import read_meta
from tests.helpers.ranks import ROOT, run_ranks
from tests.helpers.toy import build, word_config

VALIDATED = ("trainer.save_freq=1", "trainer.test_freq=1")


def fit(cfg: RLConfig) -> None:
    build(cfg).fit()


def test_the_example_of_ones_own_logger(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A job on two ranks and its continuation from step 2, because the next checkpoint is incomplete."""
    keys = (
        *VALIDATED,
        f"data.val_files=[{tmp_path}/held_out.txt]",
        "trainer.max_checkpoints=9",
        f"trainer.logger=[console,'{ROOT}/examples/my_logger.py:Csv']",
    )
    folder = tmp_path / "out"
    run_ranks(fit, 2, word_config(tmp_path, *keys, "trainer.total_training_steps=3"))
    os.rename(folder / "checkpoints" / "step_000003", folder / "checkpoints" / "step_000003.tmp")
    run_ranks(fit, 2, word_config(tmp_path, *keys, "trainer.total_training_steps=4"))
    with (folder / "rewards.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [int(line["step"]) for line in table] == [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [float(line["reward/mean"]) for line in table[1:]] == [row["reward/mean"] for row in rows[1:]]
    best = (folder / "samples" / "held_out" / "best.txt").read_text().splitlines()
    assert [line.split(":")[0] for line in best] == [f"step {step}" for step in (0, 1, 2, 3, 3, 4)]
    assert "is switched off" not in capfd.readouterr().err


@pytest.mark.full
def test_a_run_of_wandb_goes_on_from_an_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    keys = ("trainer.save_freq=1", "trainer.logger=[wandb]")
    run_ranks(fit, 1, word_config(tmp_path, *keys, "trainer.total_training_steps=1"))
    checkpoints = tmp_path / "out" / "checkpoints"
    meta = read_meta(checkpoints / "step_000001")
    (name,) = meta["progress"].pop("logger_ids").values()
    meta["progress"]["wandb_id"] = name  # the format from the time when only wandb had an id
    (checkpoints / "step_000001" / "meta.json").write_text(json.dumps(meta))
    run_ranks(fit, 1, word_config(tmp_path, *keys, "trainer.total_training_steps=2"))
    parts = (tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb")
    assert [part.name for part in parts] == [f"run-{name}.wandb"] * 2
    assert read_meta(checkpoints / "step_000002")["progress"]["logger_ids"] == {"wandb": name}
