"""The table of a folder of runs: its values, what names runs in an address, and texts of others."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.tools.board.report import main, write_report
from phalanx.tools.board.runs_page import MOST_SETTINGS, RunTable
from phalanx.tools.board.watch import FolderWatcher, Watcher, watcher_of
from tests.helpers.pages import EVIL, Page, add_ranks, logger, run


def write(folder: Path, config: str, *rewards: float) -> Path:
    with logger(folder) as log:
        for step, reward in enumerate(rewards, 1):
            row = {"reward/mean": reward, "val/test/reward/mean": reward / 2, "perf/peak_memory_gb": step}
            log.log(step, row | {"perf/tokens_per_gpu_per_s": 10.0 * step})
    (folder / "config.yaml").write_text(config)
    return folder


def table_of(root: Path) -> dict[str, Any]:
    return RunTable(root, lambda folders: dict.fromkeys(folders, "finished")).data()


def test_the_table_has_the_figures_and_the_settings_that_differ(tmp_path: Path) -> None:
    write(tmp_path / "one", "optim: {lr: 0.1, name: adam}\ntrainer: {output_dir: a, seed: 1}\n", 0.5, 1.0, 0.75)
    write(tmp_path / "deep/two", "optim: {lr: .inf, name: adam}\ntrainer: {output_dir: b, seed: 1}\n", 0.25)
    write(tmp_path / "three", "optim: {name: lion}\ntrainer: {output_dir: c, seed: 2}\n")
    for age, name in enumerate(("one", "deep/two", "three")):
        os.utime(tmp_path / name / "metrics.jsonl", (1e9 - age, 1e9 - age))
    data = table_of(tmp_path)
    assert data["columns"] == [
        *("run", "state", "test last", "test best", "training reward", "steps", "time", "tokens/s per rank"),
        *("memory (GB)", "optim.lr", "optim.name", "trainer.seed", "changed"),
    ]
    assert data["settings"] == 3
    one, two, three = data["rows"]
    elapsed = data["columns"].index("time")
    assert [one[:2], *one[2:elapsed]] == [["one", "finished"], 0.375, 0.5, 0.75, 3]
    assert one[elapsed + 1 : -1] == [20.0, 3.0, 0.1, "adam", 1.0]
    assert [two[0], *two[2:elapsed], *two[elapsed + 1 : -1]] == [
        "deep/two",
        0.125,
        0.125,
        0.25,
        1,
        10.0,
        1.0,
        "inf",
        "adam",
        1,
    ]
    assert three[0] == "three" and three[2:5] == [None] * 3 and three[-4:-1] == [None, "lion", 2.0]
    assert data["curves"][0]["reward/mean"]["y"] == [0.5, 1.0, 0.75] and data["curves"][2] == {}
    assert one[-1] == time.strftime("%Y-%m-%d %H:%M", time.localtime(1e9)) and data["reports"] == [None] * 3
    write_report(tmp_path / "deep/two")
    assert table_of(tmp_path)["reports"] == [None, "deep/two/report.html", None]


def test_what_is_new_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", "optim: {lr: 0.1}\n", 0.5)
    watcher = FolderWatcher(tmp_path)
    first = watcher.ask("/table", {})
    assert watcher.ask("/table", {"seen": first["seen"]}) == {"seen": first["seen"]}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.875}\n')
    second = watcher.ask("/table", {"seen": first["seen"]})
    steps, reward = (second["table"]["columns"].index(name) for name in ("steps", "training reward"))
    assert (second["table"]["rows"][0][steps], second["table"]["rows"][0][reward]) == (2, 0.875)
    write(tmp_path / "two", "optim: {lr: 0.2}\n", 0.5)
    assert len(watcher.ask("/table", {"seen": second["seen"]})["table"]["rows"]) == 2


def test_an_address_names_runs_of_the_folder_only(tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    for name in ("one", "two"):
        add_ranks(run(root / name))
    run(tmp_path / "outside")
    (root / "link").symlink_to(tmp_path / "outside")
    watcher = watcher_of([root])
    assert isinstance(watcher, FolderWatcher) and isinstance(watcher_of([root / "one"]), Watcher)
    page, _ = watcher.page({"of": '["one", "two"]'})
    assert b"Comparison of 2 runs" in page
    assert watcher.ask("/ranks", {"of": '["two"]'})["done"] == 3
    for of in ("", "one", "[]", '["../outside"]', '["link"]', '["one", 1]', "{}", "[" * 5000, json.dumps(["one"] * 33)):
        with pytest.raises(ValueError, match=r"of: |Expecting value"):
            watcher.page({"of": of})
        with pytest.raises(ValueError, match=r"of: |Expecting value"):
            watcher.ask("/log", {"of": of, "rank": "0"})
    with pytest.raises(ValueError, match="/table: this is no folder of runs"):
        watcher_of([root / "one"]).ask("/table", {})
    pages = [threading.Thread(target=watcher.page, args=({"of": json.dumps(["two", "one"])},)) for _ in range(4)]
    for thread in pages:
        thread.start()
    for thread in pages:
        thread.join()


def test_texts_of_others_are_never_markup(tmp_path: Path) -> None:
    write(tmp_path / EVIL.replace("/", "|"), json.dumps({"optim": {EVIL: EVIL, "x": [EVIL]}}), 0.5)
    write(tmp_path / "plain", json.dumps({f"key_{k}": k for k in range(100)}), 0.5)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "metrics.jsonl").write_bytes(b"\xff\x00\n[1]\n")
    os.utime(tmp_path / "damaged" / "metrics.jsonl", (0, 1 << 40))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "running.json").write_text("{}")
    data = table_of(tmp_path)
    assert len(data["rows"]) == 4 and data["settings"] == MOST_SETTINGS
    page = Page(write_report(tmp_path))
    assert len(page.all("script")) == 5  # two with data, and three of the page
    assert EVIL.replace("/", "|") in page.words()
    assert not page.all("img")


def test_a_folder_without_runs_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == f"error: {tmp_path}: no metrics.jsonl in it; give the trainer.output_dir of a run\n"
    )
    write(tmp_path / "one", "", 0.5)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'runs.html'}\n"
