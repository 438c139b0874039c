"""The messages of phalanx.exit."""

import signal
from pathlib import Path

import pytest

from phalanx import exit
from phalanx.exit import TOLD, Stopped


@pytest.mark.parametrize(
    ("nodes", "told", "cause"),
    [
        ("1:2", False, "nodes come or go: starting again"),  # torchrun stops the ranks, but was not stopped itself
        ("1:2", True, "stopped by SIGTERM"),
        ("2", False, "stopped by SIGTERM"),
    ],
)
def test_why_a_rank_stops(nodes: str, told: bool, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", nodes)
    monkeypatch.setattr(exit, "_mark", tmp_path / "0")
    if told:
        (tmp_path / TOLD).touch()
    assert str(Stopped(signal.SIGTERM, " after step 3 of 9")) == f"{cause} after step 3 of 9"
