"""DiffusionNFT on the quickstart's task."""

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.ranks import ROOT
from tests.helpers.tasks import run_task


@pytest.mark.full
@pytest.mark.long
def test_diffusion_nft_learns(tmp_path: Path) -> None:
    """Twelve steps on images sampled by the ODE, on two ranks: the held-out reward, with fixed noise, rises."""
    recipe = yaml.safe_load((ROOT / "configs" / "flowgrpo" / "quickstart.yaml").read_text())
    recipe["algorithm"] = {"name": "diffusion_nft"}
    recipe["optim"] = {"lr": 1e-4}
    del recipe["rollout"]["noise_level"]  # use the algorithm's default, 0
    file, out = tmp_path / "nft.yaml", tmp_path / "run"
    file.write_text(yaml.safe_dump(recipe))
    done = run_task(
        [
            "tasks/train_flowgrpo.py",
            file,
            "trainer.total_training_steps=12",
            "trainer.test_freq=12",
            f"trainer.output_dir={out}",
        ],
        nproc=2,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    before, after = (row["val/held_out/reward/mean"] for row in (rows[0], rows[-1]))
    assert 0.3 < before <= 0.62
    assert after > before + 0.06
    early, late = ([row["reward/mean"] for row in part] for part in (rows[1:5], rows[-4:]))
    assert sum(late) / 4 > sum(early) / 4 + 0.03  # of training samples, which the old policy draws
