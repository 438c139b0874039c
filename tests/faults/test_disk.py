"""A disk that fills up: the run continues with a warning, and files saved before are intact."""

import errno
import logging
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.flow import FlowRLConfig
from phalanx.run.checkpoint_folder import complete, damaged, find
from tests.faults.jobs import rows, steps
from tests.helpers.jobs import tiny_config
from tests.helpers.ranks import run_ranks

SETTINGS = ("trainer.total_training_steps=9", "trainer.save_freq=2", "model.lora_rank=4", "trainer.max_checkpoints=9")
SETTINGS += ("data.train_batch_size=2",)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    """Fill the file system completely."""
    file = os.open(folder / "filler", os.O_CREAT | os.O_WRONLY)
    try:
        while True:
            os.write(file, bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    finally:
        os.close(file)


def fit_on_a_filling_disk(cfg: FlowRLConfig, folder: Path) -> None:
    """The disk is full from the end of step 3 to the end of step 7."""
    logging.basicConfig(force=True)

    from phalanx.run.rl import build

    trainer = build(cfg)
    job, plain = trainer.job, trainer.job.end_step

    def end_step(step: int, row: dict[str, Any]) -> None:
        plain(step, row)
        if job.world.rank == 0 and step == 3:
            job.checkpointer.wait()
            fill(folder)
        if job.world.rank == 0 and step == 7:
            assert steps(folder)[-1] < 7  # the file's last page had room for a row or two
            (folder / "filler").unlink()

    job.end_step = end_step  # type: ignore[method-assign]
    trainer.fit()


@pytest.mark.full
def test_a_full_disk_costs_a_checkpoint_not_the_run(
    small_disk: Path, sd3_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, *SETTINGS, f"trainer.output_dir={small_disk}/out")
    run_ranks(fit_on_a_filling_disk, 2, cfg, small_disk)
    said = capfd.readouterr().err
    root = small_disk / "out" / "checkpoints"
    full = r"(\[Errno 28\] )?No space left on device"
    assert re.search(rf"checkpoint {root}/step_000004 was not written: {full}", said)
    assert re.search(rf"checkpoint {root}/step_000006 was not written: {full}", said)
    assert f"{small_disk}/out/metrics.jsonl: " in said and " rows wait to be written" in said
    # the rows from the time without space are written later, and only once
    assert steps(small_disk) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sorted(f.name for f in root.iterdir()) == ["step_000002", "step_000008", "step_000009"]
    assert all(complete(f) is None and damaged(f) is None for f in root.iterdir())
    assert find(root) == root / "step_000009"
    untroubled = tiny_config(sd3_folder, tmp_path, *SETTINGS)
    from tests.helpers.jobs import fit

    run_ranks(fit, 2, untroubled)
    assert rows(small_disk) == rows(tmp_path)
