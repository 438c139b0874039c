"""The exit status of `phalanx.run.launch` after ranks have failed."""

import json
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from phalanx.run.launch import _report_failures


@pytest.mark.parametrize(
    ("others", "ago", "status"),
    [([-9], 1, 137), ([-9], 31, 1), ([1], 1, 1), ([-15], 1, 1)],
    ids=["killed", "killed by the launcher", "failed", "stopped"],
)
def test_a_killed_rank_gives_the_status_though_another_one_told_first(
    others: list[int], ago: int, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has reported the loss and ended with status 1; the launcher notices both at the same time. A rank that the
    launcher killed had ignored SIGTERM for 30 s.
    """
    file = tmp_path / "error.json"
    said = {"timestamp": str(int(time.time()) - ago), "told": True}
    file.write_text(json.dumps({"message": {"message": "x", "extraInfo": said}}))
    failures = {0: ProcessFailure(0, 1, 1, str(file))}
    for rank, exitcode in enumerate(others, 1):
        failures[rank] = ProcessFailure(rank, 1 + rank, exitcode, str(tmp_path / "none.json"))
    assert _report_failures(ChildFailedError("ranks", failures)) == status
    assert capfd.readouterr().err == ""
