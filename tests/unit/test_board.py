"""The leaderboard: its tables come from its rows, and a row can be trained again."""

import json
import os
import sys
from pathlib import Path

import pytest

from phalanx.run.provenance import read_provenance
from phalanx.tools.reproduce import rerun
from phalanx.tools.reproduce.rows import read_digests
from tests.helpers.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import board

ROWS = sorted(folder.parent for folder in board.BOARD.glob("*/*/result.json"))


def test_the_page_has_the_tables_of_the_rows() -> None:
    page = board.PAGE.read_text()
    for name in board.TITLES:
        assert "\n".join(board.table(board.subject_of(name))) in page
    assert ROWS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.parent.name}-{row.name}")
def test_a_row_is_whole(row: Path) -> None:
    (entry,) = read_provenance(row)
    digests = read_digests(row)
    assert digests is not None
    result = json.loads((row / "result.json").read_text())
    assert (digests[0], entry["ranks"]["world"]) == (result["steps"], 1)
    last = json.loads((row / "metrics.jsonl").read_text().splitlines()[-1])
    subject = board.subject_of(row.parent.name)
    assert (last["step"], round(last[subject.validation], 4)) == (result["steps"], result["curve"][-1][1])
    # nothing in it is a path of the machine that made it
    assert not any(
        str(ROOT) in (row / name).read_text() for name in ("config.yaml", "provenance.json", "metrics.jsonl")
    )
    again = rerun.prepare_rerun(row, row / "x", [])
    assert not any("contents" in line for line in again.different)


def test_scores_at_equal_seconds() -> None:
    curve = [[0, 0.1, 0.0], [10, 0.5, 7.0], [20, 0.4, 14.0]]
    assert [board.value_at(curve, seconds) for seconds in (0, 6.9, 7, 13.9, 99)] == [0.1, 0.1, 0.5, 0.5, 0.4]


@pytest.mark.long
@pytest.mark.parametrize("name", list(board.TITLES))
def test_the_first_row_of_a_table_is_trained_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    row = next(row for row in ROWS if row.parent.name == name)
    assert rerun.main("verify", [str(row), f"trainer.output_dir={tmp_path / 'again'}"]) == 0
