"""The history of ranks from their files: the phases of a step, and which ranks waited for which."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.telemetry import run_folder
from phalanx.tools.board import rank_history
from phalanx.tools.board.rank_history import RankHistory


def write(folder: Path, rank: int, lines: list[dict[str, Any]], **state: Any) -> None:
    """Write a rank's state and append lines to its file; times are in seconds after 1000."""
    (folder / "ranks").mkdir(parents=True, exist_ok=True)
    values = {"rank": rank, "ranks": 3, "host": "a", "pid": 1, "at": 1000.0, "role": "actor", "interval": 2.0}
    (folder / "ranks" / f"{rank}.json").write_text(json.dumps(values | state))
    with (folder / "ranks" / f"{rank}.jsonl").open("a") as file:
        for line in lines:
            for key in line.keys() & {"from", "to", "at"}:
                line[key] += 1000
            file.write(json.dumps(line) + "\n")


def phase(name: str, step: int, begin: float, end: float) -> dict[str, Any]:
    return {"phase": name, "step": step, "from": begin, "to": end}


def wait(number: int, begin: float, end: float) -> dict[str, Any]:
    return {"wait": number, "from": begin, "to": end}


def test_who_waits_for_whom(tmp_path: Path) -> None:
    """The last rank to arrive waits least, or too briefly to be recorded; clock differences do not matter."""
    write(tmp_path, 0, [phase("rollout", 1, 0, 4), wait(1, 1, 4), phase("update", 1, 4, 6), wait(2, 5, 5.5)], step=2)
    write(tmp_path, 1, [phase("rollout", 1, 0.5, 4.5), wait(1, 2.5, 4.5), phase("update", 1, 4.5, 6.5)], step=2)
    write(tmp_path, 2, [phase("rollout", 1, 0, 4), phase("update", 1, 4, 6), wait(2, 4.25, 5.5)], step=2)
    data = RankHistory(tmp_path).data()
    assert (data["step"], data["begin"], data["seconds"]) == (1, 1000.0, 6.0)
    assert data["blame"] == [(2, 5.0), (1, 1.75)]
    assert [0, 2, 1.0, 4.0] in data["waits"] and [1, 2, 2.5, 4.5] in data["waits"]
    assert [1, "update", 4.5, 6.0] in data["spans"]  # up to the end of the step of rank 0


def test_roles_have_numbers_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, 0, [phase("update", 1, 0, 2), wait(7, 0, 1)], role="actor")
    write(tmp_path, 1, [phase("update", 1, 0, 2)], role="actor")
    write(tmp_path, 2, [phase("rollout", 2, 0, 2), wait(7, 0, 2)], role="rollout")
    data = RankHistory(tmp_path).data()
    assert data["blame"] == [(1, 1.0)]
    assert [2, "rollout", 0.0, 2.0] in data["spans"]  # of the next step, which it samples ahead


def test_the_last_whole_step_or_the_one_that_is_asked_for(tmp_path: Path) -> None:
    history = RankHistory(tmp_path)
    for step in (1, 2):
        write(tmp_path, 0, [phase("rollout", step, step, step + 1)], step=2)
    assert (history.data()["step"], history.data()["steps"]) == (1, [1, 1])
    write(tmp_path, 0, [phase("update", 2, 3, 3.5), phase("rollout", 3, 3.5, 4)], step=3)
    data = history.data()
    assert (data["step"], data["steps"], data["seconds"]) == (2, [1, 2], 1.5)
    assert [history.data(step)["step"] for step in (1, 2, 99, -5)] == [1, 2, 2, 1]
    write(tmp_path, 0, [], step=3, ended="finished")
    assert history.data()["step"] == 3


def test_events_are_told_once(tmp_path: Path) -> None:
    write(tmp_path, 0, [{"event": "start", "at": 0, "ranks": 4, "host": "a"}, phase("checkpoint", 2, 1, 3)])
    write(tmp_path, 1, [{"event": "start", "at": 0, "ranks": 4}, {"event": "error", "at": 2, "text": "<b>lost</b>"}])
    history = RankHistory(tmp_path)
    kinds = [(event["kind"], event["rank"], event["text"]) for event in history.data()["events"]]
    first = [
        ("start", 0, "4 ranks, the first on a"),
        ("error", 1, "<b>lost</b>"),
        ("checkpoint", 0, "after step 2, 2 s"),
    ]
    assert kinds == first
    write(tmp_path, 0, [{"event": "start", "at": 5, "ranks": 3, "host": "b"}])
    write(tmp_path, 0, [{"event": "stopped", "at": 6, "text": "why"}, {"event": "said", "at": 7, "text": "why"}])
    kinds = [(event["kind"], event["rank"], event["text"]) for event in history.data()["events"]]
    write(tmp_path, 1, [{"event": "failed", "at": 6, "text": "why"}, {"event": "failed", "at": 99, "text": "why"}])
    assert [event["at"] for event in history.data()["events"] if event["kind"] == "failed"] == [1099]
    assert kinds[len(first) :] == [("restart", 0, "3 ranks, the first on b (before: 4 ranks)"), ("stopped", 0, "why")]


def test_a_message_is_shown_once(tmp_path: Path) -> None:
    """One that several ranks log within a minute, and one that the page has already."""
    for rank in range(3):
        lines = [{"event": "warning", "at": at, "text": "slow"} for at in (10 + rank, 200)]
        write(tmp_path, rank, [*lines, {"event": "warning", "at": 20, "text": "nothing to learn from" + "x" * 600}])
    events = RankHistory(tmp_path).data(shown=["nothing to learn from" + "x" * 600])["events"]
    assert [(event["at"] - 1000, event["text"]) for event in events] == [(10, "slow"), (200, "slow")]


def test_the_timeline_is_that_of_the_last_complete_step(tmp_path: Path) -> None:
    """A step without a row of metrics was interrupted: the job has ended in its middle."""
    lines = [phase("rollout", 1, 0, 1), phase("update", 1, 1, 3), phase("rollout", 2, 3, 3.5)]
    write(tmp_path, 0, lines, ranks=1, step=2, ended="failed")
    assert [RankHistory(tmp_path).data(done=done)["step"] for done in (None, 2, 1, 0)] == [2, 2, 1, 1]


def test_each_role_tells_its_own_events(tmp_path: Path) -> None:
    """Rank 0 samples and validates; the rank that trains saves checkpoints and reports at the end what was saved."""
    ends = ["what is kept is said elsewhere", "checkpoints/step_1 is kept", "checkpoints/step_1 is kept"]
    for rank, role in enumerate(("rollout", "actor", "actor")):
        lines = [
            {"event": "start", "at": 0, "ranks": 3, "host": "a"},
            {"event": "stopped", "at": 9, "text": ends[rank]},
        ]
        both = phase("validation", 2, 3, 4 + rank)  # all roles take part in it
        write(tmp_path, rank, [*lines, phase("checkpoint" if rank else "validation", 1, 2, 3), both], role=role)
    events = [(event["kind"], event["rank"]) for event in RankHistory(tmp_path).data()["events"]]
    assert events == [("start", 0), ("validation", 0), ("checkpoint", 1), ("validation", 0), ("stopped", 1)]


def test_a_file_is_read_as_it_grows_and_as_it_is_cut(tmp_path: Path) -> None:
    history = RankHistory(tmp_path)
    write(tmp_path, 0, [{"event": "start", "at": 0, "ranks": 3}, phase("rollout", 1, 0, 1)])
    path = tmp_path / "ranks" / "0.jsonl"
    with path.open("a") as file:
        file.write('{"phase":"update","step":1,"from":1001,')  # half a line
    assert history.data()["seconds"] == 1.0
    with path.open("a") as file:
        file.write('"to":1003}\nnot JSON\n[]\n')
    assert history.data()["seconds"] == 3.0
    path.with_suffix(".tmp").write_text(path.read_text().split("\n", 1)[1])  # truncated at the front
    path.with_suffix(".tmp").replace(path)
    data = history.data()
    assert data["seconds"] == 3.0 and [event["kind"] for event in data["events"]] == ["start"]
    assert len(data["spans"]) == 2


def test_events_go_on_where_a_clock_is_set_back(tmp_path: Path) -> None:
    """Ranks of an earlier and larger start are omitted, even if their files have later times."""
    history = RankHistory(tmp_path)
    write(tmp_path, 2, [{"event": "start", "at": 5, "ranks": 3}], at=1005.0)
    write(tmp_path, 0, [{"event": "start", "at": 5, "ranks": 3}], at=1005.0)
    assert [state["rank"] for state in history.data()["ranks"]] == [0, 2]
    write(
        tmp_path, 0, [{"event": "start", "at": -900, "ranks": 2}, {"event": "warning", "at": -899}], at=101.0, ranks=2
    )
    data = history.data()
    assert [state["rank"] for state in data["ranks"]] == [0]
    assert sorted(event["at"] for event in data["events"]) == [100, 101, 1005]


def test_a_step_that_a_resumed_start_repeats_is_that_of_the_last_start(tmp_path: Path) -> None:
    """It does not include the hours from the first begin to the second end."""
    write(tmp_path, 0, [{"event": "start", "at": 0, "ranks": 1}, phase("rollout", 1, 0, 2)], ranks=1, step=1)
    write(tmp_path, 0, [{"event": "start", "at": 9000, "ranks": 1}, phase("rollout", 1, 9001, 9002)], ranks=1, step=1)
    write(tmp_path, 0, [phase("update", 1, 9002, 9005)], ranks=1, step=2)
    data = RankHistory(tmp_path).data()
    assert (data["step"], data["begin"], data["seconds"]) == (1, 10001.0, 4.0)


def test_a_link_that_leads_out_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "other", 0, [phase("rollout", 1, 0, 1)])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ranks").symlink_to(tmp_path / "other" / "ranks")
    assert RankHistory(tmp_path / "run").data()["ranks"] == []


def test_no_ranks(tmp_path: Path) -> None:
    data = RankHistory(tmp_path).data()
    assert (data["ranks"], data["step"], data["events"], data["spans"]) == ([], None, [], [])
    assert rank_history.MAX_EVENTS > 0


def test_many_files_are_read_at_once_and_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 ranks on a file system that takes 20 ms for a file. The first rank's lines are read whole, and the last ones
    of the others.
    """
    for rank in range(100):
        lines = [
            {"event": "start", "at": 0, "ranks": 100},
            *(phase("rollout", step, step, step + 1) for step in range(99)),
        ]
        write(tmp_path, rank, lines, ranks=100)
    reads, plain = list[str](), run_folder.read_json

    def slow(folder: Path, name: str) -> dict[str, Any] | None:
        time.sleep(0.02)
        reads.append(name)
        return plain(folder, name)

    monkeypatch.setattr(run_folder, "read_json", slow)
    monkeypatch.setattr(rank_history, "MOST_READ", 100 * 2000)
    monkeypatch.setattr(rank_history, "SOON_S", 0.0)
    history, begin = RankHistory(tmp_path), time.monotonic()
    first = history.data()
    seconds = time.monotonic() - begin
    assert [state["rank"] for state in first["ranks"]] == list(range(100)) and seconds < 0.02 * 100 * 0.7
    write(tmp_path, 0, [], ranks=100, at=2000.0)
    assert history.data()["ranks"][0]["at"] == 1000.0 and len(reads) == 100
    time.sleep(rank_history.PAUSE * seconds + 0.1)
    assert history.data()["ranks"][0]["at"] == 2000.0 and len(reads) == 200
    assert [event["text"] for event in first["events"]] == ["100 ranks, the first on None"]
    assert len(history._lines[0].phases) == 99 and 20 < len(history._lines[99].phases) < 40
