"""What `phalanx.launch` makes of the ranks that failed."""

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from phalanx.launch import _tell


@pytest.mark.parametrize(("others", "status"), [([-9], 137), ([1], 1), ([-15], 1)], ids=["killed", "failed", "stopped"])
def test_a_killed_rank_gives_the_status_though_another_one_told_first(
    others: list[int], status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has printed what it lost, and ended with status 1; the launcher finds both of them at once."""
    file = tmp_path / "error.json"
    file.write_text(json.dumps({"message": {"message": "x", "extraInfo": {"timestamp": "1", "told": True}}}))
    failures = {0: ProcessFailure(0, 1, 1, str(file))}
    for rank, exitcode in enumerate(others, 1):
        failures[rank] = ProcessFailure(rank, 1 + rank, exitcode, str(tmp_path / "none.json"))
    assert _tell(ChildFailedError("ranks", failures)) == status
    assert capfd.readouterr().err == ""
