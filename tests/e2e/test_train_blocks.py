"""The real command, `sh train.sh tasks/train_block_diffusion.py ...`, on two nodes."""

from pathlib import Path

import pytest

from tests.helpers.jobs import rows
from tests.helpers.lm import fit_sft, sft_overrides, tiny_sft_config
from tests.helpers.ranks import run_ranks, two_nodes


@pytest.mark.full
@pytest.mark.long
def test_two_nodes_are_one_world(lm_folder: Path, tmp_path: Path) -> None:
    """Two torchruns with one rank each give the same results as two ranks on one node."""
    fixed = ["parallel.fsdp_size=2", "trainer.save_freq=2"]
    nodes = two_nodes(["tasks/train_block_diffusion.py", *sft_overrides(lm_folder, tmp_path / "two"), *fixed])
    assert [node.returncode for node in nodes] == [0, 0], nodes[0].stderr + nodes[1].stderr
    assert "report:" in nodes[0].stdout and "report:" not in nodes[1].stdout
    run_ranks(fit_sft, 2, tiny_sft_config(lm_folder, tmp_path / "one", *fixed))
    assert rows(tmp_path / "two" / "out") == rows(tmp_path / "one" / "out")
