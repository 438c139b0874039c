"""The leaderboard: its tables come from its rows, and a row can be trained again."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.provenance import read_provenance
from phalanx.tools.reproduce import rerun
from phalanx.tools.reproduce.rows import read_digests
from tests.helpers.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import board

ROWS = sorted(folder.parent for folder in board.BOARD.glob("*/*/result.json"))
FIRST = [row for row in ROWS if json.loads((row / "result.json").read_text())["seed"] == 0]  # of each recipe


def test_the_page_has_the_tables_of_the_rows() -> None:
    page = board.PAGE.read_text()
    assert "\n".join(board.tables()) in page
    assert ROWS
    for subject in map(board.subject_of, board.TITLES):
        own = board.own_table(subject, board.base_of(subject), board.shown_runs(subject))
        assert "\n".join(own) in (ROOT / "docs" / subject.page).read_text()


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


@pytest.mark.parametrize("row", FIRST, ids=lambda row: f"{row.parent.name}-{row.name}")
def test_the_files_of_a_recipe_are_here(row: Path) -> None:
    again = rerun.prepare_rerun(row, row / "x", ["trust_run=true"])  # a recipe may name a tool of benchmarks/
    assert not any("contents" in line for line in again.different)


def scored(seed: int, score: float, *curve: list[float]) -> dict[str, Any]:
    return {"seed": seed, "steps": 20, "after": {"test": score}, "scores": [score, score], "curve": [*curve]}


def test_scores_at_equal_seconds() -> None:
    """The run of a recipe that took least counts, spread evenly over its steps."""
    curve = [[0, 0.1, 0.0], [10, 0.5, 7.0], [20, 0.4, 16.0]]
    beside = [[0, 0.1, 0.0], [10, 0.5, 1.0], [20, 0.4, 30.0]]  # other work ran
    after = board.least_seconds([scored(0, 0.4, *beside), scored(1, 0.4, *curve)])
    assert after == [0, 8, 16]
    assert [board.value_at(curve, after, seconds) for seconds in (0, 7.9, 8, 15.9, 99)] == [0.1, 0.1, 0.5, 0.5, 0.4]


def test_ties_and_recipes_that_ended_before() -> None:
    """A difference of a single seed, or within the interval of several, is a tie; one at equal seconds also if a little
    more or less of them would make it one.
    """
    rows = {
        "grpo": [scored(seed, 0.5 + seed / 100, [0, 0.1, 0.0], [20, 0.5, 20.0]) for seed in (0, 1)],
        "better": [scored(seed, 0.9 + seed / 100, [0, 0.1, 0.0], [20, 0.3, 10.0]) for seed in (0, 1)],
        "close": [scored(seed, 0.5, [0, 0.1, 0.0], [10, 0.4, 10.0], [20, 0.5, 22.0]) for seed in (0, 1)],
        "slower": [scored(0, 0.7, [0, 0.1, 0.0], [20, 0.7, 30.0])],
    }
    assert board.compared(board.subject_of("learn_lm"), rows) == {
        "grpo": ["`grpo`", "0.505±0.064", "", "0.500±0.000", ""],
        "better": ["`better`", "0.905±0.064", "+0.400±0.000", "0.300±0.000*", "-0.200±0.000"],
        "close": ["`close`", "0.500±0.000", "-0.005±0.064 ≈", "0.400±0.000", "-0.100±0.000 ≈"],
        "slower": ["`slower`", "0.700", "+0.200 ≈", "0.100", "-0.400 ≈"],
    }
    columns = ["recipe", "right answers to test.jsonl, 2560 samples", "difference from `grpo`"]
    assert board.head(board.subject_of("learn_lm"), rows) == [*columns, "at 20 CPU seconds", "difference"]


def test_a_table_for_each_processor(tmp_path: Path) -> None:
    """Neither bits nor CPU seconds are those of another one."""
    row = next(row for row in ROWS if row.parent.name == "learn_lm")
    (entry,) = read_provenance(row)
    entry["processor"]["model_name"] = "another"
    (tmp_path / "provenance.json").write_text(json.dumps([entry]))
    groups = board.by_processor({"grpo": [{"row": row}, {"row": tmp_path}], "raft": [{"row": tmp_path}]})
    assert [[(name, len(runs)) for name, runs in group.items()] for group in groups.values()] == [
        [("grpo", 1)],
        [("grpo", 1), ("raft", 1)],
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", list(board.TITLES))
def test_the_first_row_of_a_table_is_trained_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal within rounding on the row's processor. On another one the runs part once rounding has grown, if at all."""
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    row = next(row for row in ROWS if row.parent.name == name)
    status = rerun.main("verify", [str(row), f"trainer.output_dir={tmp_path / 'again'}"])
    if status and any("processor" in line for line in rerun.prepare_rerun(row, tmp_path / "x", []).different):
        parted = re.match(r"different from step (\d+) .*; the first layer", capsys.readouterr().out.splitlines()[-1])
        assert parted and int(parted[1]) > 5
    else:
        assert status == 0
