"""Two jobs never share an output_dir, and a dead job does not block it."""

import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.messages import cut
from phalanx.run import folder_lock
from phalanx.run.folder_lock import FolderLock, unwritable
from tests.helpers.jobs import fit, tiny_config
from tests.helpers.ranks import RankError, run_ranks


def hold(folder: Path, ready: Any, job: str = "") -> None:
    FolderLock(folder, lambda _: None, lambda: None, job)
    ready.set()
    time.sleep(600)


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """A process that has locked the folder."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "out", ready), daemon=True)
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


def test_the_second_job_ends_with_the_first_ones_name(other: Any, sd3_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match=f"trainer.output_dir: .*/out is in use by another job, process {other.pid} on "
    ):
        run_ranks(fit, 2, tiny_config(sd3_folder, tmp_path, "trainer.total_training_steps=1"))
    assert other.is_alive()
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_a_rank_that_was_left_behind_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that goes on in place takes the folder over from the frozen one that led the job before; others do not."""
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.1)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    frozen = context.Process(target=hold, args=(tmp_path, ready, "ours"), daemon=True)
    frozen.start()
    assert ready.wait(60)
    os.kill(frozen.pid or 0, signal.SIGSTOP)
    with pytest.raises(ValueError, match=f"is in use by another job, process {frozen.pid} on "):
        FolderLock(tmp_path, lambda _: None, lambda: None, "another")
    begin = time.monotonic()
    lock = FolderLock(tmp_path, lambda _: None, lambda: None, "ours")
    assert time.monotonic() - begin < 5 and not lock._locked
    assert json.loads((tmp_path / "running.json").read_text())["pid"] == os.getpid()
    frozen.kill()
    frozen.join()
    deadline = time.monotonic() + 20
    while not lock._locked and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lock._locked, "a third job would find the lock free"
    lock.release()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "nowhere").symlink_to(tmp_path / "no" / "where")
    for name, problem in (
        ("file", "something else has this name"),
        ("file/deep", "Not a directory"),
        ("circle", "something else has this name"),
        ("nowhere", "something else has this name"),
        ("x" * 300, "File name too long"),
    ):
        folder = tmp_path / name
        with pytest.raises(OSError) as error:
            FolderLock(folder, lambda _: None, lambda: None)
        said = f"trainer.output_dir: '{cut(str(folder))}' cannot be made or written: {problem}"
        assert str(unwritable(folder, error.value)) == said


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", ".lock"])
def test_what_stands_in_the_way_of_a_runs_files(sd3_folder: Path, tmp_path: Path, name: str) -> None:
    cfg = tiny_config(sd3_folder, tmp_path, "trainer.total_training_steps=1", "trainer.save_freq=1")
    blocked = Path(cfg.trainer.output_dir) / name
    blocked.parent.mkdir(parents=True)
    if name == "checkpoints":
        blocked.touch()
    else:
        blocked.mkdir()
    with pytest.raises(RankError, match=f"trainer.output_dir: '{blocked}' cannot be made or written: "):
        run_ranks(fit, 1, cfg)


def test_a_dead_job_is_no_hindrance(other: Any, tmp_path: Path) -> None:
    os.kill(other.pid, signal.SIGKILL)
    other.join()
    begin = time.monotonic()
    lock = FolderLock(tmp_path / "out", lambda _: None, lambda: None)
    assert time.monotonic() - begin < folder_lock.PATIENCE_S
    assert json.loads((tmp_path / "out" / "running.json").read_text())["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / "out" / "running.json").exists()


def test_a_request_to_stop_is_for_one_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old request, with the token of another start, is ignored; one with the lock's token is followed once."""
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.05)
    asked: list[str] = []
    request = tmp_path / "stop.json"
    request.write_text('{"token": "of a start before"}')
    lock = FolderLock(tmp_path, lambda _: None, lambda: asked.append("stop"))
    time.sleep(0.5)
    assert asked == []
    request.write_text((tmp_path / "running.json").read_text())
    deadline = time.monotonic() + 60
    while not asked and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    assert asked == ["stop"]
    lock.release()
    assert not request.exists()


def note(folder: Path, beat: int) -> None:
    """Write what a job on another machine, whose locks are not visible here, would write."""
    job = {"host": "node-b", "pid": 7, "since": "then", "machine": "node-b x", "token": "theirs", "beat": beat}
    (folder / "new").write_text(json.dumps(job))
    (folder / "new").rename(folder / "running.json")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.1)


@pytest.mark.usefixtures("fast")
def test_a_job_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note(tmp_path, 1)
    beat = threading.Timer(0.3, note, (tmp_path, 2))
    beat.start()
    monkeypatch.setattr(folder_lock, "PATIENCE_S", 60.0)
    with pytest.raises(ValueError, match="is in use by another job, process 7 on node-b, since then; stop that job"):
        FolderLock(tmp_path, lambda _: None, lambda: None)
    monkeypatch.setattr(folder_lock, "PATIENCE_S", 1.0)
    begin = time.monotonic()
    FolderLock(tmp_path, lambda _: None, lambda: None).release()
    assert time.monotonic() - begin >= 1


@pytest.mark.usefixtures("fast")
def test_a_job_that_was_thought_dead_ends_when_it_wakes(tmp_path: Path) -> None:
    lost: list[str] = []
    lock = FolderLock(tmp_path, lost.append, lambda: None)
    note(tmp_path, 1)
    deadline = time.monotonic() + 60
    while not lost and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [line.split(";")[0] for line in lost] == [
        f"trainer.output_dir: {tmp_path} is in use by another job, process 7 on node-b, since then"
    ]
    lock.release()
    assert (tmp_path / "running.json").exists()  # it is the other's


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        FolderLock(tmp_path / "file", lambda _: None, lambda: None)
