"""The report's page that compares several runs."""

import json
from pathlib import Path

import pytest

from phalanx.tools.board.comparison import labels_of
from phalanx.tools.board.report import main, write_report
from tests.helpers.pages import Page, logger, run, steps_of


class TestSeveralRuns:
    def test_curves_share_charts_and_samples_stand_side_by_side(self, tmp_path: Path) -> None:
        one, two = steps_of(tmp_path / "one", "ocr", 3, 2), steps_of(tmp_path / "two", "ocr", 5, 2)
        (one / "config.yaml").write_text("optim: {lr: 0.1}\ntrainer: {n: 1}\n")
        (two / "config.yaml").write_text("optim: {lr: 0.2, eps: 1}\ntrainer: {n: 1}\n")
        path = write_report(one, two)
        assert path == one / "comparison.html"
        page = Page(path)
        words = page.words()
        assert "Comparison of 2 runs lr=0.1: one · lr=0.2, eps=1: two Samples Curves" in words
        reward = page.charts()[0]["series"]
        assert [(series["label"], series["colour"], series["x"]) for series in reward] == [
            ("lr=0.1", 0, [0, 1, 2]),
            ("lr=0.2, eps=1", 1, [0, 1, 2, 3, 4]),
        ]
        assert "Seconds by phase · lr=0.1" in words and "Seconds by phase · lr=0.2, eps=1" in words
        assert "p0 lr=0.1 · 2 2.000 ocr 0 · clip 2 lr=0.2, eps=1 · 4 4.000 ocr 0 · clip 2" in words
        (slider,) = [tag for tag in page.all("input") if "data-steps" in tag]
        assert slider["data-steps"] == "0,1,2,3,4"
        assert "Settings that differ setting lr=0.1 lr=0.2, eps=1 optim.eps - 1 optim.lr 0.1 0.2 Resolved" in words

    def test_it_begins_with_one_table_of_figures_and_differences(self, tmp_path: Path) -> None:
        for name, gain, steps in (("one", 0.0, 2), ("two", 0.25, 3)):
            with logger(tmp_path / name) as log:
                for step in range(steps + 1):
                    row = {"val/ocr/reward/mean": (0.5, 1.0, 0.75, 0.5)[step] + gain}
                    row |= {"perf/peak_memory_gb": 8.0 + step, "perf/images_per_gpu_per_s": 4.0 + gain} if step else {}
                    log.log(step, row | ({"reward/mean": 0.5 + gain} if step else {}))
            rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            rows[-1]["perf/elapsed_s"] = 100.0 * steps
            (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        page = Page(write_report(tmp_path / "one", tmp_path / "two"))
        assert page.words().startswith(
            "Comparison of 2 runs one · two Samples Curves Figures and settings run ocr first ocr last ocr best training reward steps time "
            "images/s per rank memory (GB) "
            "one 0.5 0.75 1 0.5 2 0:03:20 4 10 "
            "two 0.75 +0.25 0.75 +0 1.25 +0.25 0.75 +0.25 3 +1 0:05:00 +0:01:40 4.25 +0.25 11 +1 "
        )
        assert not any(tag.get("class", "").startswith("tile") for tag in page.all("div"))

    def test_a_difference_counts_beyond_its_interval(self, tmp_path: Path) -> None:
        """The interval of a difference is that of two independent means, by Zou and Donner."""
        for name, last in (("one", 0.5), ("two", 0.8), ("three", 0.6)):
            with logger(tmp_path / name) as log:
                for step, mean in enumerate((0.5, last)):
                    row = {"val/ocr/reward/mean": mean, "val/ocr/reward/ci95": 0.1}
                    log.log(step, row | {"val/ocr/reward/ci95_low": mean - 0.12})
        page = Page(write_report(tmp_path / "one", tmp_path / "two", tmp_path / "three"))
        smalls = [tag["class"] for tag in page.all("small")]
        assert smalls[:3] == ["tie", "better", ""] and smalls.count("better") == 1
        assert "two 0.5 +0 tie 0.8 +0.3 0.8 +0.3" in page.words() and "0.6 +0.1 tie" in page.words()
        for name, kind, words in (
            ("one", "tie", "+0.000 from step 0 to 1, 95 % interval -0.144 to +0.144: a tie"),
            ("two", "better", "▲ +0.300 from step 0 to 1, 95 % interval +0.156 to +0.444"),
            ("three", "tie", "+0.100 from step 0 to 1, 95 % interval -0.044 to +0.244: a tie"),
        ):
            # the roots of 0.12² + 0.08² on both sides: each mean reaches 0.12 down and 0.08 up
            page = Page(write_report(tmp_path / name))
            assert f"tile {kind}" in [tag.get("class") for tag in page.all("div")]
            assert words in page.words()

    def test_a_message_that_runs_share_is_shown_once(self, tmp_path: Path) -> None:
        folders = [steps_of(tmp_path / name, "ocr", 2, 2) for name in ("one", "two")]
        with logger(tmp_path / "three") as log:
            log.log(0, {"val/ocr/reward/mean": 0.5})
        words = Page(write_report(*folders, tmp_path / "three")).words()
        assert words.count("No validation was logged") == 1
        assert "one; two: No validation was logged, so" in words

    def test_runs_are_named_by_what_differs(self) -> None:
        base = {"optim": {"lr": 0.1, "eps": 1}, "critic": {"lr": 1}, "trainer": {"output_dir": "a", "seed": 1}}
        other = base | {"optim": {"lr": 0.2, "eps": 1}, "trainer": {"output_dir": "b", "seed": 1}}
        names = ["one", "two", "three"]
        assert labels_of([base, other], names[:2]) == ["lr=0.1", "lr=0.2"]
        assert labels_of([base, other, other], names) == ["lr=0.1", "lr=0.2 (two)", "lr=0.2 (three)"]
        assert labels_of([base, other | {"critic": {"lr": 2}}], names[:2]) == [
            "optim.lr=0.1, critic.lr=1",
            "optim.lr=0.2, critic.lr=2",
        ]
        assert labels_of([base, base | {"trainer": {"output_dir": "b", "seed": 2}}], names[:2]) == ["seed=1", "seed=2"]
        for different in (base, {}, {"a": 1, "b": 2, "c": 3, "optim": {}}):  # nothing, no file, and too much
            assert labels_of([base, different], names[:2]) == ["one", "two"]

    def test_the_same_name_twice_and_an_output_of_one_s_own(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folders = [str(run(tmp_path / part / "run")) for part in "ab"]
        page = tmp_path / "page.html"
        assert main([*folders, "-o", str(page)]) == 0
        assert capsys.readouterr().out == f"{page}\n"
        labels = [series["label"] for series in Page(page).charts()[0]["series"]]
        assert labels == folders
        assert not list(tmp_path.rglob("comparison.html"))

    def test_a_run_without_validation_beside_one_that_has_some(self, tmp_path: Path) -> None:
        with logger(tmp_path / "bare") as log:
            log.log(1, {"reward/mean": 0.5})
        page = Page(write_report(tmp_path / "bare", run(tmp_path / "full")))
        assert len(page.all("img")) == 2
        assert "There is no config.yaml in bare." in page.words()
