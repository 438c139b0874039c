"""DiffusionNFT of FLUX.2 and FLUX.1 Kontext; the recipes train FlowGRPO of them (tests/unit/test_recipes.py)."""

from pathlib import Path

import pytest
import torch

from tests.helpers.jobs import algorithm_config, one_step
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_edit import write_edits


@pytest.mark.seldom("flux2", "flux2_klein_edit", "flux_kontext")
@pytest.mark.parametrize("family", ["flux2", "flux2_klein", "flux2_klein_edit", "flux_kontext"])
def test_a_step_of_diffusion_nft(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(f"{family.removesuffix('_edit')}_folder")
    keys = ["algorithm.level_distribution=uniform", "rollout.noise_level=0", "model.lora_rank=4"]
    if family in ("flux2_klein_edit", "flux_kontext"):
        keys += ["model.reference_size=32", f"data.train_files=[{write_edits(tmp_path / 'edits')}]"]
    cfg = algorithm_config(folder, tmp_path, "diffusion_nft", f"model.family={family}", *keys)
    (result,) = run_ranks(one_step, 1, cfg)
    row, weights = result["row"], result["weights"]
    assert row["actor/grad_norm"] > 0 and row["actor/updates_skipped"] == 0
    assert any(value.any() for name, value in weights.items() if "lora_B" in name)
    assert all(torch.isfinite(value).all() for value in weights.values())
