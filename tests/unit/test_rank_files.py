"""The files of each rank: their content, that they stay short, and that they hardly cost a step any time."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx import exit
from phalanx.config.parallel import ParallelConfig
from phalanx.distributed import mesh
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped
from phalanx.run.telemetry import rank_files
from phalanx.run.telemetry.rank_files import RankFiles
from phalanx.run.telemetry.run_folder import read_ranks
from phalanx.run.world import lone_world
from phalanx.telemetry.timers import Timers


@pytest.fixture
def world() -> Iterator[World]:
    with mesh.alone():
        yield lone_world(ParallelConfig(), 1, 0, torch.device("cpu"))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ranks" / "0.jsonl").read_text().splitlines()]


def test_what_a_rank_does_and_says(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timers = Timers()
    begin = time.time()
    with RankFiles(tmp_path, world, timers, 5):
        timers.step = 3
        with timers("update"):
            timers.expect(2)
            timers.advance()
            print("on the \x1b[1mterminal\x1b[0m", file=sys.stdout)
            logging.getLogger("phalanx").warning("a bad <step>")
            exit.say("last words")  # written at once
            (state,) = read_ranks(tmp_path)
    assert (state["step"], state["total"], state["phase"], state["pid"]) == (3, 5, "update 1/2", os.getpid())
    assert begin <= state["phase_since"] <= state["at"] <= time.time() and state["memory_gb"] > 0
    log = (tmp_path / "ranks" / "0.log").read_text()
    assert "on the terminal\n" in log and log.endswith("last words\n")
    assert capsys.readouterr().out == "on the \x1b[1mterminal\x1b[0m\n"  # unchanged
    (phase,) = [line for line in lines(tmp_path) if "phase" in line]
    assert (phase["phase"], phase["step"]) == ("update", 3) and begin <= phase["from"] <= phase["to"] <= time.time()
    events = [(line["event"], line.get("text", "")) for line in lines(tmp_path) if "event" in line]
    assert events == [("start", ""), ("warning", "a bad <step>"), ("said", "last words"), ("finished", "")]
    assert read_ranks(tmp_path)[0]["ended"] == "finished"
    exit.say("after it")
    assert (tmp_path / "ranks" / "0.log").read_text() == log


@pytest.mark.parametrize(("error", "end"), [(Stopped(15), "stopped"), (ValueError("why"), "failed")])
def test_how_a_rank_ends(error: Exception, end: str, world: World, tmp_path: Path) -> None:
    streams = sys.stdout, sys.stderr
    with pytest.raises(type(error)), RankFiles(tmp_path, world, Timers(), None):
        raise error
    assert (lines(tmp_path)[-1]["event"], lines(tmp_path)[-1]["text"]) == (end, str(error))
    assert read_ranks(tmp_path)[0]["ended"] == end
    assert (sys.stdout, sys.stderr) == streams
    exit.copy = exit._no_copy  # a failing process keeps the copy for its final message


def test_the_files_stay_short(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "MAX_BYTES", 4000)
    timers = Timers()
    with RankFiles(tmp_path, world, timers, None) as files:
        for step in range(400):
            timers.step = step
            with timers("rollout"):
                print(f"line {step}")
            if step % 50 == 49:
                files.flush()
    for ending in ("jsonl", "log"):
        assert 1000 < (tmp_path / "ranks" / f"0.{ending}").stat().st_size < 8000
    steps = [line["step"] for line in lines(tmp_path) if "phase" in line]
    assert steps == list(range(steps[0], 400))
    log = (tmp_path / "ranks" / "0.log").read_text().splitlines()
    assert log == [f"line {step}" for step in range(int(log[0].split()[1]), 400)]


def test_many_ranks_write_their_state_less_often_and_what_is_rare_at_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of 400 ranks; the watch would let it write every 0.05 s, and 400 ranks may write 200 states per second."""
    watch: Any = world.watch
    watch.rank, watch.hosts, watch.interval = 399, ["host"] * 400, 0.05
    monkeypatch.setattr(rank_files, "STATES_PER_S", 200)
    written, plain, timers = list[float](), rank_files.write_json, Timers()

    def write_json(folder: Path, *args: Any) -> None:
        if folder == tmp_path:  # threads of other tests may go on
            written.append(time.monotonic())
        plain(folder, *args)

    def wait_for(ready: Callable[[str], bool]) -> str:
        while not written or not ready(text := (tmp_path / "ranks" / "399.jsonl").read_text()):
            time.sleep(0.01)
        return text

    monkeypatch.setattr(rank_files, "write_json", write_json)
    with RankFiles(tmp_path, world, timers, None):
        wait_for(lambda text: "start" in text)
        with timers("rollout"):
            logging.getLogger("phalanx").warning("at once")
        assert "rollout" not in wait_for(lambda text: "at once" in text) and len(written) == 1
        wait_for(lambda text: "rollout" in text)
        time.sleep(2.5)
    # the first one, one in this rank's turn, one or more after 2 s each, and the last one
    *regular, _ = written
    assert len(regular) >= 3 and min(after - before for before, after in pairwise(regular)) > 1.95
    state = json.loads((tmp_path / "ranks" / "399.json").read_text())
    assert state["interval"] == 2 and state["ended"] == "finished"


def test_a_disk_that_refuses_them_ends_no_job(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ranks").write_text("in the way")
    with RankFiles(tmp_path, world, Timers(), None) as files:
        files.flush()
        files.flush()
    assert [record.message for record in caplog.records if "phalanx watch cannot show" in record.message] != []
    assert len(caplog.records) == 1


def test_a_phase_costs_microseconds(world: World, tmp_path: Path) -> None:
    """The median over many phases, in the training's thread, with a generous limit."""
    timers = Timers()
    seconds = []
    with RankFiles(tmp_path, world, timers, None):
        for _ in range(2000):
            begin = time.perf_counter()
            with timers("rollout"):
                pass
            seconds.append(time.perf_counter() - begin)
    assert sorted(seconds)[1000] < 100e-6
