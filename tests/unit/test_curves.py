"""The metrics of a run as they grow: read on from where they were, and bounded."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from phalanx.run.telemetry import curves
from phalanx.run.telemetry.curves import Curves, Points
from phalanx.run.telemetry.growing_file import GrowingFile
from phalanx.run.telemetry.run_folder import RunReader
from phalanx.tools.board.samples import Room, samples_html
from phalanx.tools.board.watch import Watcher
from tests.helpers.hostile import in_child, png
from tests.helpers.pages import add_ranks, curves_of, run


def line(step: int, **row: Any) -> str:
    return json.dumps({"step": step} | row) + "\n"


def read_bytes_of(act: Any) -> int:
    """The bytes that this process reads in a call."""

    def count() -> int:
        fields = dict(pair.split(": ") for pair in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"])

    before = count()
    act()
    return count() - before


def test_only_new_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, x=step) for step in range(10_000)))
    reader = RunReader(tmp_path)
    assert reader.read().points("x")[-1] == (9_999, 9_999.0)
    with path.open("a") as file:
        file.write(line(10_000, x=1) + '{"step": 10001, "x"')
    assert read_bytes_of(reader.read) < 20_000 < path.stat().st_size
    run = reader.read()
    assert run.points("x")[-1] == (10_000, 1.0) and len(run.points("x")) == run.curves.rows == 10_001
    with path.open("a") as file:
        file.write(": 2}\n")
    assert reader.read().last_step() == 10_001


def test_a_file_that_was_replaced_or_cut_is_read_anew(tmp_path: Path) -> None:
    """As when a run is resumed, and when a disk was full."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1, x=1) + line(2, x=2) + line(3, x=3))
    reader = RunReader(tmp_path)
    assert reader.read().points("x") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    path.with_name("new").write_text(line(1, x=1) + line(2, x=5) + line(3, x=6) + line(4, x=7))
    path.with_name("new").replace(path)
    assert reader.read().points("x") == [(1, 1.0), (2, 5.0), (3, 6.0), (4, 7.0)]
    os.truncate(path, len(line(1, x=1)))
    assert reader.read().points("x") == [(1, 1.0)]
    path.unlink()
    with pytest.raises(ValueError, match=r"no metrics\.jsonl in it"):
        reader.read()


def test_warnings_are_those_of_all_rows_each_once(tmp_path: Path) -> None:
    """A run whose number of steps is not known may be as short as it is now."""
    path = tmp_path / "metrics.jsonl"
    reader, cut = RunReader(tmp_path), {"response/truncated_ratio": 1.0}
    flat = {"reward/max": 1.0, "reward/min": 1.0, "reward/mean": 1.0, "actor/lr": 1e-3}
    path.write_text(line(1, **flat, **cut) + line(2, **flat))
    advice = reader.read().advice
    assert len(advice) == 2 and "every sample of the last 2 steps, up to step 2" in advice[1]
    assert reader.read().advice == advice
    with path.open("a") as file:
        file.write("".join(line(step, **flat) for step in range(3, 9)))
    advice = reader.read().advice
    assert len(advice) == 2 and "every sample of the last 5 steps, up to step 5" in advice[1]


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MOST_VALUES", 1000)
    kept = Curves()
    for step in range(10_000):
        kept.add({"step": step, "a": step, "b": None})
    points = kept.points["a"]
    assert len(points) <= 1000 and points[-1] == (9999, 9999.0) and len(points) + kept.left_out == 10_000
    assert (kept.rows, kept.last_step, kept.points["b"]) == (10_000, 9999, [])
    monkeypatch.setattr(curves, "MOST_NAMES", 2)
    assert list(curves_of({"step": 1, "a": 1, "b": 2, "c": 3}).points) == ["a", "b"]
    names = curves_of({"step": 1, "x" * 900: 1}).points
    assert [len(name) for name in names] == [200]
    assert Points([1, 3], [1.0, 2.0]).aligned([1, 2, 3]) == [(1, 1.0), (2, 0.0), (3, 2.0)]


def test_a_file_of_which_only_the_end_is_read(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"".join(b'{"a": %d}\n' % i for i in range(1000)))
    file = GrowingFile(tmp_path, "f", 95, lambda: None)
    assert [text for _, text in file.lines()] == [b'{"a": %d}' % i for i in range(992, 1000)] and file.cut


@pytest.mark.full
def test_a_hundred_thousand_steps(tmp_path: Path) -> None:
    """At first seconds, then no more than what is new; within 150 MB."""
    values = {f"actor/k{j}": 0.1 * j for j in range(20)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(100_000):
            file.write(line(step, **values, x=step))

    def act() -> None:
        watcher = Watcher([tmp_path])
        seen = watcher.ask("/sections", {})
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(line(100_000, **values, x=1))
        answer = dict[str, Any]()
        query = {"seen": seen["seen"], "kept": seen["kept"]}
        assert read_bytes_of(lambda: answer.update(watcher.ask("/sections", query))) < 100_000
        assert "samples" not in answer and len(answer["charts"][0]["series"][0]["x"]) == 1000

    assert in_child(act, 150 << 20) == ""


def test_images_that_were_scaled_are_kept(tmp_path: Path) -> None:
    """For the next page, which a validation with other images makes necessary."""
    folder = run(tmp_path)
    image = folder / "images/ocr/step_000003/00000.png"
    image.write_bytes(png(600, 20))
    reader, room = RunReader(folder), Room()
    first = samples_html([reader.read()], room)
    assert len(room.scaled) == 1 and "image/jpeg" in first
    again = Room(scaled=dict.fromkeys(room.scaled, b"kept"))
    assert "a2VwdA==" in samples_html([reader.read()], again)
    image.unlink()
    image.write_bytes(png(600, 21))
    assert "a2VwdA==" not in samples_html([reader.read()], again) and len(again.scaled) == 2


def test_files_that_change_while_they_are_read(tmp_path: Path) -> None:
    folder, done = add_ranks(run(tmp_path / "run")), threading.Event()
    images = folder / "images" / "ocr" / "step_000003"

    def change() -> None:
        while not done.is_set():
            for place in (
                folder / "metrics.jsonl",
                folder / "config.yaml",
                images / "index.jsonl",
                images / "00000.png",
            ):
                content = place.read_bytes()
                place.unlink()
                os.mkfifo(place)
                place.unlink()
                place.symlink_to("/etc/passwd")
                place.unlink()
                place.write_bytes(content[: len(content) // 2])
                place.write_bytes(content)
            done.wait(0.005)  # in which all files are whole

    def act() -> None:
        reader, watcher, tries, pages = RunReader(folder), Watcher([folder]), 0, 0
        threading.Thread(target=change, daemon=True).start()
        while tries < 60 or pages == 0:  # in_child ends it
            tries += 1
            try:
                text = samples_html([reader.read()]) + json.dumps(watcher.ask("/sections", {}))
            except ValueError as error:
                assert "no metrics.jsonl in it" in str(error)
                continue
            pages += 1
            assert "root:x:" not in text
        done.set()

    assert in_child(act) == ""
