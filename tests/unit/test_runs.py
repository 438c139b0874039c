"""`phalanx runs`, `logs` and `stop` on folders like those that jobs leave behind."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.run import folder_lock
from phalanx.run.folder_lock import FolderLock
from phalanx.run.telemetry.run_folder import read_ranks
from phalanx.tools.board import runs
from phalanx.tools.board.runs import main, overview, states
from tests.helpers.checks import wait_for

HUGE = b"9" * 400
DAMAGE = {
    "running.json": b'{"beat"',
    "metrics.jsonl": b'{"step": 1, "perf/elapsed_s": 1}\n{"step": 2, "perf/elapsed_s": '
    + HUGE
    + b'}\n{"step": 3, "perf/ela',
    "ranks/0.json": b'{"rank": 0, "ranks": 2, "host": "h", "pid": 1, "at": ' + HUGE + b"}",
    "ranks/1.json": b"\xff\x00",
    "config.yaml": b"trainer: [",
}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(runs, "POLL_S", 0.05)


def a_run(folder: Path, steps: int = 4, total: int | None = 10, ranks: int = 2, **state: Any) -> Path:
    """Create a run's folder after some steps of 2 s each, with two ranks per host."""
    (folder / "ranks").mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        rows.append(json.dumps({"step": step, "perf/elapsed_s": 2 * step}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(rows))
    for rank in range(ranks):
        values = {"rank": rank, "ranks": ranks, "host": f"node-{rank // 2}", "pid": 100 + rank, "at": time.time()}
        (folder / "ranks" / f"{rank}.json").write_text(json.dumps(values | {"total": total} | state))
    return folder


def test_runs_and_their_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "BEAT_S", 0.5)
    a_run(tmp_path / "a" / "finished", 10, ended="finished", ranks=8)
    (a_run(tmp_path / "dead") / "running.json").write_text('{"pid": 7, "host": "x", "beat": 3, "token": "t"}')
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3')
    (tmp_path / "old" / "config.yaml").write_text("trainer: {total_training_steps: 6}\n")
    a_run(tmp_path / "dead" / "images" / "no run")  # subfolders of a run are not searched
    lock = FolderLock(a_run(tmp_path / "lives"), lambda _: None, lambda: None)
    os.utime(tmp_path / "dead" / "running.json", (0, 0))
    assert main("runs", [str(tmp_path)]) == 0
    lock.release()
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["RUN", "STATE", "STEP"]
    table = [row.removeprefix(f"{tmp_path}/").split() for row in rows]
    assert [row[:5] for row in table] == [
        ["a/finished", "finished", "10/10", "-", "8"],
        ["dead", "dead", "4/10", "-", "2"],
        ["lives", "running", "4/10", "0:00:12", "2"],
        ["old", "ended", "2/6", "-", "-"],
    ]
    assert " node-0, node-1, node-2 and 1 more " in rows[0] and f" {os.getpid()} " in rows[2]


def test_a_beat_counts_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job runs on a machine whose clock is an hour slow."""
    monkeypatch.setattr(runs, "BEAT_S", 0.5)
    lock = FolderLock(a_run(tmp_path / "run"), lambda _: None, lambda: None)
    done = threading.Event()

    def turn_back() -> None:
        while not done.wait(0.005):
            os.utime(tmp_path / "run" / "running.json", (time.time() - 3600,) * 2)

    thread = threading.Thread(target=turn_back)
    thread.start()
    try:
        assert states([tmp_path / "run"]) == {tmp_path / "run": "running"}
    finally:
        done.set()
        thread.join()
        lock.release()


def test_ranks_of_a_larger_start_are_left_out(tmp_path: Path) -> None:
    """After a node was lost, the files of its ranks remain."""
    a_run(tmp_path / "run", ranks=4)
    for rank in range(4):
        path = tmp_path / "run" / "ranks" / f"{rank}.json"
        state = json.loads(path.read_text())
        state |= {"ranks": 2, "at": state["at"] + 60} if rank < 2 else {}
        path.write_text(json.dumps(state))
    assert [state["rank"] for state in read_ranks(tmp_path / "run")] == [0, 1]
    assert overview(tmp_path / "run", "running").hosts == ["node-0"]


def test_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run", ended="finished")
    (run / "ranks" / "1.log").write_text("one\ntwo\nthree\n")
    assert main("logs", [str(run), "--rank", "1"]) == 0
    assert capsys.readouterr().out == "one\ntwo\nthree\n"
    assert main("logs", [str(run), "--rank", "1", "-n", "2", "--follow"]) == 0  # it has ended
    assert capsys.readouterr().out == "two\nthree\n"
    (run / "ranks" / "1.log").unlink()
    assert main("logs", [str(run), "--rank", "1"]) == 0
    assert capsys.readouterr().err == f"{run}: rank 1 has written nothing\n"
    assert main("logs", [str(run), "--rank", "9"]) == 2
    assert capsys.readouterr().err == f"error: {run}: no log of rank 9; its ranks are 0, 1\n"


def printed(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Capture stdout from now on, so that it can be read while a thread prints."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    return out


def test_a_log_is_followed_until_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if its beginning is removed in the meantime."""
    out = printed(monkeypatch)
    run = a_run(tmp_path / "run")
    lock = FolderLock(run, lambda _: None, lambda: None)
    log = run / "ranks" / "0.log"
    one, two = "1" * 800 + "\n", "2" * 800 + "\n"
    log.write_text(one + two)
    thread = threading.Thread(target=main, args=("logs", [str(run), "--follow"]), daemon=True)
    thread.start()
    wait_for(lambda: two in out.getvalue())
    log.with_suffix(".new").write_text(two + "three\n")
    log.with_suffix(".new").rename(log)
    wait_for(lambda: "three" in out.getvalue())
    with log.open("a") as file:
        file.write("four\n")
    lock.release()
    thread.join(60)
    assert not thread.is_alive()
    assert out.getvalue() == f"{one}{two}three\nfour\n"


@pytest.mark.parametrize("ended", ["stopped", "failed"])
def test_stop(ended: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, asked = a_run(tmp_path / "run"), threading.Event()
    lock = FolderLock(run, lambda _: None, asked.set)

    def train() -> None:
        assert asked.wait(60)
        a_run(tmp_path / "after", 5, ended=ended)
        for name in ("metrics.jsonl", "ranks/0.json"):
            (tmp_path / "after" / name).rename(run / name)
        lock.release()

    thread = threading.Thread(target=train)
    thread.start()
    assert main("stop", [str(run)]) == (1 if ended == "failed" else 0)
    thread.join()
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"asked process {os.getpid()} on ") and last == f"{ended} after step 5 of 10"
    assert main("stop", [str(run)]) == 2
    assert capsys.readouterr().err == f"error: {run}: no job runs here (state: {ended}); nothing to stop\n"


@pytest.mark.parametrize("ended", ["stopped", "finished", "failed", None])
def test_a_stopped_evaluation_says_how_it_has_ended(
    ended: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation has no steps. If it fails while stopping, or does not record its end, `stop` fails."""
    lock: list[FolderLock] = []

    def end() -> None:
        (tmp_path / "arguments.json").write_text(json.dumps({"facts": {}, "complete": ended == "finished"}))
        if ended is not None:
            (tmp_path / "ended.json").write_text(json.dumps({"ended": ended, "text": f"{ended}: so it was"}))
        threading.Thread(target=lock[0].release).start()

    lock.append(FolderLock(tmp_path, lambda _: None, end))
    assert main("stop", [str(tmp_path)]) == (0 if ended in ("stopped", "finished") else 1)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (f"{ended}: so it was" if ended else "failed")
    assert main("stop", [str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: no job runs here (state: ended); nothing to stop\n"


def test_a_stop_tells_the_last_words_of_the_ranks_that_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With roles, only the ranks that train know what was saved. A concurrent second request succeeds too."""
    out = printed(monkeypatch)
    run, lock = a_run(tmp_path / "run", role="rollout", ended="stopped"), list[FolderLock]()
    state = json.loads((run / "ranks" / "1.json").read_text()) | {"role": "actor"}
    (run / "ranks" / "1.json").write_text(json.dumps(state))
    words = "stopped by phalanx stop after step 4 of 10; the same command resumes from checkpoints/step_4"
    for rank, text in enumerate(("stopped by phalanx stop; what is kept is said where the actor runs", words)):
        lines = [{"event": name, "at": 1.0, "text": text} for name in ("stopped", "said")]
        (run / "ranks" / f"{rank}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    second = threading.Thread(target=main, args=("stop", [str(run)]))

    def end() -> None:
        second.start()
        wait_for(lambda: out.getvalue().count("asked process ") == 2)
        lock[0].release()

    lock.append(FolderLock(run, lambda _: None, threading.Thread(target=end).start))
    assert main("stop", [str(run)]) == 0
    second.join(60)
    assert sorted(out.getvalue().splitlines()[2:]) == [words, words]
    assert main("stop", [str(run)]) == 2
    assert capsys.readouterr().err == f"error: {run}: no job runs here (state: stopped); nothing to stop\n"


def test_a_request_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a folder of another user."""
    run = a_run(tmp_path / "run")
    lock = FolderLock(run, lambda _: None, lambda: None)
    (run / "stop.json").mkdir()
    assert main("stop", [str(run)]) == 2
    lock.release()
    reason = (
        "the request cannot be written (Is a directory); "
        "run this as the user of the job, or send SIGTERM to its launcher"
    )
    assert capsys.readouterr().err == f"error: {run}: {reason}\n"


def test_hundreds_of_runs_and_damaged_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a line within seconds, with a single wait for the heartbeats of all silent ones."""
    monkeypatch.setattr(runs, "BEAT_S", 0.2)
    for number in range(300):
        a_run(tmp_path / f"{number:03d}", ended="finished")
    for number, (name, content) in enumerate(DAMAGE.items()):
        path = a_run(tmp_path / f"damaged_{number}") / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)
    (a_run(tmp_path / "damaged_link") / "config.yaml").symlink_to("config.yaml")
    begin = time.monotonic()
    assert main("runs", [str(tmp_path)]) == 0
    assert time.monotonic() - begin < 100
    shown = capsys.readouterr()
    states_of = [line.split()[1] for line in shown.out.splitlines()[1:]]
    assert states_of.count("finished") == 300 and len(states_of) == 301 + len(DAMAGE)
    assert shown.err == ""


def test_a_job_that_dies_before_it_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PATIENCE_S", 0.5)
    (a_run(tmp_path / "run") / "running.json").write_text('{"pid": 7, "host": "x", "beat": 3, "token": "t"}')
    assert main("stop", [str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'run'}: process 7 on x died before it stopped\n"
    assert json.loads((tmp_path / "run" / "stop.json").read_text()) == {"token": "t"}


@pytest.mark.parametrize("command", ["logs", "stop"])
def test_other_folders_are_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, [str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no metrics.jsonl or running.json in it; give the ")
    assert main(command, [str(tmp_path / "x")]) == 2
    assert main("runs", [str(tmp_path / "x")]) == 2
    assert main("runs", [str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"


def test_a_log_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Model outputs may contain escape sequences; only the end of a huge log is read."""
    folder = a_run(tmp_path / "run")
    with (folder / "ranks" / "0.log").open("wb") as file:
        file.seek(5 << 30)  # a sparse file
        file.write(b"\n\x1b]0;title\x07 \x1b[2J caf\xc3\xa9 \xff\n")
    assert main("logs", [str(folder), "-n", "1"]) == 0
    assert capsys.readouterr().out == "\\x1b]0;title\\x07 \\x1b[2J café \ufffd\n"


def test_who_reads_only_the_head_of_a_log_gets_no_error(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    (folder / "ranks" / "0.log").write_text("line\n" * 200_000)
    pipe = f"{sys.executable} -m phalanx logs '{folder}' | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", pipe], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "line\n", "")
