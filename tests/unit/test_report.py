"""The HTML report: its content, that it is self-contained, and that it tolerates missing files."""

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from phalanx.telemetry.records import Record
from phalanx.tools.board.charts import MAX_BARS, MAX_POINTS
from phalanx.tools.board.report import main, write_report
from phalanx.tools.board.samples import BEST, MAX_CARDS, MAX_SAMPLES, MAX_TEXT_CARDS, UNFOLDED
from phalanx.zoo.loggers.console import shown_keys
from tests.helpers.logs import prompt_image, talk
from tests.helpers.pages import Page, logger, picture, run, steps_of

SRC = Path(__file__).parents[2] / "src"
KNOWN = [
    "Training reward",
    "Validation reward",
    "Reward terms",
    "Importance ratio",
    "Gradient norm",
    "Throughput (images per second and rank)",
    "Seconds by phase",
    "FLOPs utilisation",
]


def test_it_says_what_the_files_say(tmp_path: Path) -> None:
    path = write_report(run(tmp_path))
    assert path == tmp_path / "report.html"
    page = Page(path)
    words = page.words()
    assert "<title>my &lt;run&gt; · Phalanx</title>" in page.source
    assert "Validation · ocr 0.500 → 0.750 ▲ +0.250 from step 0 to 3" in words
    assert "Validation · easy 0.900 → 0.800 ▼ -0.100 from step 0 to 3" in words
    assert "Training reward 0.100 → 0.300 ▲ +0.200 from step 1 to 3" in words
    assert "Training steps 3 of 3" in words
    assert "Wall time 0:00:0" in words
    assert "Throughput 20 images per second and rank Model FLOPs 25.0 % of the device's peak" in words
    titles = re.findall(r'<figure class="chart"><figcaption>(.*?)</figcaption>', page.source)
    assert titles[: len(KNOWN)] == KNOWN
    assert "experiment_name: my <run>" in words  # the configuration, as text
    assert len(page.charts()) == len(titles)
    assert titles[len(KNOWN) :] == ["perf/elapsed_s", "reward/max"]  # metrics without a predefined chart
    assert "reward/mean 0.1 0.3 0.1 0.3 3" in words  # the table
    assert "actor/grad_norm 0.5 1 0.5 1 2" in words  # NaN is not counted as a value


def test_the_rate_of_a_cpu_is_no_peak(tmp_path: Path) -> None:
    """The ratio has a curve, but no tile, and is not shown on the console."""
    with logger(tmp_path) as log:
        for step in (1, 2):
            row = {"reward/mean": 0.1 * step, "perf/cpu_mfu": 0.25 * step, "perf/cpu_hfu": 0.5 * step}
            assert shown_keys(row) == ["reward/mean"]
            log.log(step, row)
    page = Page(write_report(tmp_path))
    assert "Model FLOPs" not in page.words()
    titles = re.findall(r'<figure class="chart"><figcaption>(.*?)</figcaption>', page.source)
    assert "FLOPs utilisation" in titles and "perf/cpu_mfu" not in titles


def test_the_same_prompts_stand_side_by_side(tmp_path: Path) -> None:
    page = Page(write_report(run(tmp_path)))
    images = page.all("img")
    assert [image["alt"] for image in images] == [
        'Step 0, reward 0.250: sign "0" & <more>',
        'Step 3, reward 0.875: sign "0" & <more>',
        'Step 0, reward 0.250: sign "1" & <more>',
        'Step 3, reward 0.875: sign "1" & <more>',
    ]
    for image, seed in zip(images, (0, 10, 1, 11), strict=True):
        kind, data = image["src"].split(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as decoded:
            assert np.array_equal(np.asarray(decoded), picture(seed))
        assert image["class"] == "pixels"  # tiny images are not smoothed
    assert 'sign "0" & <more> Step 0 0.250 Step 3 0.875' in page.words()  # the prompt precedes its samples


def test_it_needs_no_network_and_describes_its_charts(tmp_path: Path) -> None:
    page = Page(write_report(run(tmp_path)))
    assert page.all("link") == page.all("iframe") == []
    sources = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert all(source.startswith(("data:", "#")) for source in sources)
    (style,) = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    assert not re.search(r"https?:|url\(|@import", style)
    assert "prefers-color-scheme:dark" in style
    plots = [tag for tag in page.all("div") if tag.get("class", "").startswith("plot")]
    assert plots[1]["aria-label"] == (
        "Validation reward: easy from 0.9 at step 0 to 0.8 at step 3, lowest 0.8, highest 0.9; "
        "ocr from 0.5 at step 0 to 0.75 at step 3, lowest 0.5, highest 0.75"
    )


def test_texts_stand_side_by_side_as_they_are(tmp_path: Path) -> None:
    prompts = ["What is 1 < 2?", "Write\n  <b>bold</b> & more"]
    with logger(tmp_path) as log:
        log.records(0, "math", [Record(p, 0.0, f"<script>{i}</script>\n  no", i) for i, p in enumerate(prompts)])
        log.records(1, "math", [Record(p, 0.75, "</pre> yes & done", i) for i, p in enumerate(prompts)])
        log.log(1, {"reward/mean": 0.5})
    page = Page(write_report(tmp_path))
    assert page.all("img") == page.all("b")[4:] == []  # only the rewards are bold
    assert "math: step 0 to 1" in page.words()
    assert "What is 1 < 2? <script>0</script> no Step 0 0.000 </pre> yes & done Step 1 0.750" in page.words()
    assert "<pre>&lt;script&gt;1&lt;/script&gt;\n  no</pre>" in page.source  # line breaks and spaces are preserved
    assert "No validation samples" not in page.words()


def test_cut_and_empty_answers_are_marked(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        records = [Record("a", 0.5, "one two", 0, truncated=True), Record("b", 0.5, " \n", 1), Record("c", 0.5, "x", 2)]
        log.records(0, "math", records)
    words = Page(write_report(tmp_path)).words()
    assert "a one two cut Step 0 0.500 b (no text) empty Step 0 0.500 c x Step 0 0.500" in words


def test_conversations_are_shown_message_by_message(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        log.records(0, "tools", [talk("</pre><script>alert(1)</script>")])
        for step in range(1, 4):
            row = {"conversation/turns_mean": 1 + step / 4, "tools/call_frequency": step / 4}
            row |= {"conversation/reward_turns_1": step / 8, "val/tools/conversation/reward_turns_2": step / 2}
            log.log(step, row)
    page = Page(write_report(tmp_path))
    talked = (
        'assistant calc({"expression": "2 * 1"}) tool calc 2 assistant so </pre><script>alert(1)</script> '
        "2 turns; 1 call; 0.25 s in the environment; rewards 0, 0.5; ended: done Step 0 0.500"
    )
    assert f"2 * 3? {talked}" in page.words()  # the user's message is the prompt, which is not repeated
    assert len(page.all("script")) == 3  # the data, uPlot, and ours
    titles = ["Turns and calls per sample", "Reward by number of turns", "Validation reward by number of turns"]
    assert all(title in page.words() for title in titles)
    labels = [[series["label"] for series in chart["series"]] for chart in page.charts()]
    assert labels[:3] == [
        ["conversation/turns_mean", "tools/call_frequency"],
        ["1"],
        ["tools/conversation/reward_turns_2"],
    ]


def test_ground_truths_of_texts_stand_below_their_prompts(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        for step in range(2):
            log.records(step, "math", [Record("1 + 1?", 0.5, "two", 0, ground_truth="<2>\n#### 2")])
        log.log(1, {"reward/mean": 0.5})
    page = Page(write_report(tmp_path))
    assert "1 + 1? ground truth: <2> #### 2 two Step 0 0.500 two Step 1 0.500" in page.words()


def test_images_of_prompts_stand_in_their_cards(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        for step in range(2):
            log.records(
                step, "seen", [Record("Read it.", 0.5, "two", 0, images=(prompt_image(),)), Record("b", 0.5, "c", 1)]
            )
        log.log(1, {"reward/mean": 0.5})
    (image,) = Page(write_report(tmp_path)).all("img")  # once, and not at each step
    assert image["alt"] == "data.val_files: a.jsonl:1: images[0], 300 x 200 pixels"
    (tmp_path / "samples" / "seen" / "step_000001" / prompt_image().file).unlink()
    assert "image file is missing or damaged Read it." in Page(write_report(tmp_path)).words()


def test_large_images_are_scaled(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        log.records(0, "ocr", [Record("a", 0.5, picture(0, 1024, 512), 0)])
    (image,) = Page(write_report(tmp_path)).all("img")
    kind, data = image["src"].split(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as decoded:
        assert decoded.size == (256, 512)
    assert "class" not in image and image["tabindex"] == "0"  # it can be enlarged with the keyboard


def test_pictures_are_shown_at_their_size(tmp_path: Path) -> None:
    """At most 256 pixels, since a card shows two images; tiny images are magnified by an integer."""
    for name, width, shown in (("tiny", 32, 128), ("small", 160, 160), ("large", 1024, 256)):
        with logger(tmp_path / name) as log:
            log.records(0, "ocr", [Record("a", 0.5, picture(0, 32, width), 0)])
        assert f'<div class="cards images" style="--w:{shown}px;--n:1">' in Page(write_report(tmp_path / name)).source


@pytest.mark.parametrize(("losses", "columns"), [(0, 2), (1, 3), (2, 4), (3, 5), (4, 3), (5, 4), (6, 4)])
def test_no_tile_is_left_over(losses: int, columns: int, tmp_path: Path) -> None:
    keys = ("train/loss", "actor/flow_loss", "actor/dpo_loss", "actor/nll", "actor/teacher_kl", "actor/teacher_x")
    with logger(tmp_path) as log:
        log.log(1, dict.fromkeys(keys[:losses], 1.0) | {"actor/lr": 1.0})
    page = Page(write_report(tmp_path))
    (tiles,) = [tag["style"] for tag in page.all("section") if tag.get("class") == "tiles"]
    assert tiles == f"--columns:{columns}"
    assert sum(tag.get("class", "").split() == ["tile"] for tag in page.all("div")) == losses + 2


def test_supervised_training_shows_its_loss(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        for step in range(1, 4):
            log.log(step, {"train/loss": 6.0 - step, "train/accuracy": 0.25 * step, "actor/grad_norm": 1.0 + step})
    page = Page(write_report(tmp_path))
    words = page.words()
    assert "Training loss 5.000 → 3.000 ▼ -2.000 from step 1 to 3" in words
    assert [chart["series"][0]["label"] for chart in page.charts()][:2] == ["train/loss", "train/accuracy"]
    assert "No training step was logged." not in words


def test_losses_of_preferences_are_shown(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        for step in range(1, 3):
            log.log(step, {"actor/dpo_loss": 0.75 - 0.25 * step, "actor/accuracy": 0.5})
    assert "Loss · dpo_loss 0.500 → 0.250 ▼ -0.250 from step 1 to 2" in Page(write_report(tmp_path)).words()


def test_metrics_that_never_change_are_named_and_not_drawn(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        for step in range(1, 4):
            row = {"actor/ratio_mean": 1.0, "actor/ratio_std": 0.0, "actor/clipfrac": 0.0, "response/length_mean": step}
            log.log(step, row | {"reward/zero_std_ratio": 0.5, "time/update": 2.0})
    page = Page(write_report(tmp_path))
    titles = re.findall(r'<figure class="chart"><figcaption>(.*?)</figcaption>', page.source)
    assert titles == ["Response length (tokens)", "Seconds by phase", "perf/elapsed_s"]
    assert (
        "Constant over all steps, and therefore not drawn: actor/clipfrac 0, actor/ratio_mean 1, actor/ratio_std 0, "
        "reward/zero_std_ratio 0.5."
    ) in page.words()


def test_the_warnings_of_the_job_are_repeated(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: {max_response_length: 64}\n")
    with logger(tmp_path) as log:
        log.log(1, {"response/truncated_ratio": 1.0})
    note = "All responses of step 1 are cut at data.max_response_length=64, before their end of sequence: raise it, or"
    assert note in Page(write_report(tmp_path)).words()


class TestMissingPieces:
    def test_no_rows(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").touch()
        words = Page(write_report(tmp_path)).words()
        assert words.startswith(
            f"{tmp_path.name} Samples Curves Figures and settings Training steps 0 metrics.jsonl has no rows yet."
        )
        assert "No validation samples were kept (trainer.log_val_generations, images/ or samples/)." in words
        assert "There is nothing to draw." in words
        assert "There is no config.yaml in the folder." in words

    def test_one_training_step(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "perf/step_s": 61.0}\n')
        page = Page(write_report(tmp_path))
        words = page.words()
        assert "Training reward 0.500 step 1 only" in words
        assert "No validation was logged, so there is no figure on held-out prompts." in words
        assert "Wall time 0:01:01" in words
        assert [chart["series"][0]["y"] for chart in page.charts()] == [[0.5], [61.0]]

    def test_one_validation(self, tmp_path: Path) -> None:
        folder = run(tmp_path)
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text(rows[0] + "\n")
        page = Page(write_report(folder))
        words = page.words()
        assert "Validation · ocr 0.500 step 0 only" in words
        assert "No training step was logged." in words
        # The images of step 3 belong to an earlier run in this folder, which got further.
        assert "Only the validation of step 0 kept images: nothing to compare with yet." in words
        assert [image["alt"][:6] for image in page.all("img")] == ["Step 0", "Step 0"]

    def test_an_image_that_was_deleted_or_cut_off(self, tmp_path: Path) -> None:
        folder = run(tmp_path)
        (folder / "images/ocr/step_000003/00001.png").unlink()
        (folder / "images/ocr/step_000003/00000.png").write_bytes(b"\x89PNG")
        page = Page(write_report(folder))
        assert len(page.all("img")) == 2
        assert page.words().count("image file is missing or damaged") == 2

    def test_many_prompts_are_cut_and_changed_prompts_are_not_compared(self, tmp_path: Path) -> None:
        with logger(tmp_path) as log:
            for name, word in ("a", "same"), ("b", "new"):
                log.records(0, name, [Record("same", 0.5, picture(0), i) for i in range(MAX_CARDS + 3)])
                log.records(1, name, [Record(word, 0.5, picture(0), i) for i in range(MAX_CARDS + 3)])
            texts = [Record(f"p{i}", 0.5, "text", i) for i in range(MAX_TEXT_CARDS + 5)]
            log.records(0, "texts", texts)
            log.log(1, {"reward/mean": 0.5})
        page = Page(write_report(tmp_path))
        assert f"{MAX_TEXT_CARDS} of {MAX_TEXT_CARDS + 5} prompts are shown." in page.words()
        folds = f"{MAX_CARDS - UNFOLDED} more prompts", f"{MAX_TEXT_CARDS - UNFOLDED} more prompts"
        assert [page.words().count(fold) for fold in folds] == [1, 1]
        assert len(page.all("img")) == 2 * MAX_CARDS + 4 * BEST
        assert f"{MAX_CARDS} of {MAX_CARDS + 3} prompts are shown." in page.words()
        assert "b: step 0 to 1 The validations have no prompt in common." in page.words()

    def test_a_configuration_that_is_no_yaml_is_still_shown(self, tmp_path: Path) -> None:
        folder = run(tmp_path)
        (folder / "config.yaml").write_text("a: [1\n")
        assert "a: [1" in Page(write_report(folder)).words()


class TestCommand:
    def test_it_prints_the_path(self, tmp_path: Path) -> None:
        folder = run(tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "phalanx.tools.board.report", str(folder)],
            env={**os.environ, "PYTHONPATH": str(SRC)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder / 'report.html'}\n", "")
        assert (folder / "report.html").stat().st_size > 10_000

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("none", "no such folder"), ("file", "no such folder"), ("empty", "no metrics.jsonl in it")],
    )
    def test_a_bad_folder_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
    ) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").touch()
        folder = tmp_path / name
        assert main([str(folder)]) == 2
        assert capsys.readouterr() == ("", f"error: {folder}: {reason}; give the trainer.output_dir of a run\n")

    def test_a_broken_index_is_named(self, tmp_path: Path) -> None:
        """The samples that are not broken are shown."""
        path = run(tmp_path) / "images/ocr/step_000003/index.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join(['{"index": 0}', "nonsense", lines[0], lines[1].replace("0.875", '"high"')]))
        page = Page(write_report(tmp_path))
        assert "3 lines of images/ocr/step_000003/index.jsonl: damaged." in page.words()
        assert len(page.all("img")) == 3 and page.words().count("damaged Step 3 no reward") == 1


def scripts(page: Page) -> list[str]:
    """The scripts that a browser would run."""
    return re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)


class TestHostileTexts:
    TEXT = "</script><script>alert(1)</script><!--<script> </template></pre><img src=x onerror=alert(1)>"

    def test_nothing_breaks_out(self, tmp_path: Path) -> None:
        with logger(tmp_path) as log:
            for step in range(3):
                log.records(step, "ocr", [Record(self.TEXT, 0.5, picture(0), 0, scores={self.TEXT: 1.0})])
                log.records(step, "math", [Record(self.TEXT, 0.5, self.TEXT, 0)])
                log.log(step, {"reward/mean": 0.5, self.TEXT: step, f"val/{self.TEXT}/reward/mean": 0.5 + step})
        (tmp_path / "config.yaml").write_text(f"trainer: {{experiment_name: '{self.TEXT}'}}\n")
        page = Page(write_report(tmp_path))
        assert len(page.all("script")) == 3  # the data, uPlot, and ours
        assert all(image["src"].startswith("data:") for image in page.all("img"))
        assert self.TEXT in [series["label"] for chart in page.charts() for series in chart["series"]]
        assert page.words().count(self.TEXT) > 5

    def test_only_the_page_s_own_scripts_may_run(self, tmp_path: Path) -> None:
        page = Page(write_report(run(tmp_path)))
        policy = page.all("meta")[1]["content"]
        sums = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts(page)]
        assert len(sums) == 2
        allowed = " ".join(f"'sha256-{digest}'" for digest in sums)
        assert policy == (
            f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src {allowed}"
        )

    def test_the_licence_of_uplot_is_with_it(self, tmp_path: Path) -> None:
        source = write_report(run(tmp_path)).read_text()
        assert "Copyright (c) 2022 Leon Sorokin" in source
        assert "uPlot (v1.6.32)" in scripts(Page(tmp_path / "report.html"))[0]


class TestSteps:
    def test_a_slider_goes_through_the_validations(self, tmp_path: Path) -> None:
        page = Page(write_report(steps_of(tmp_path, "ocr", 4, 1)))
        (slider,) = [tag for tag in page.all("input") if "data-steps" in tag]
        assert slider["data-steps"] == "1,2,3"  # beside them stands step 0, or another that is chosen
        assert "beside step 0 1 2 3 p0" in page.words()
        assert (slider["min"], slider["max"], slider["value"]) == ("0", "2", "2")
        assert [tag["data-step"] for tag in page.all("div") if "data-step" in tag] == ["0", "3"]
        waiting = re.findall(r'<template data-step="(.)">.*?<span>Step (.)</span><b>(.).000</b>', page.source)
        assert waiting == [("1", "1", "1"), ("2", "2", "2")]

    def test_many_validations_are_cut_to_some_with_the_first_and_the_last(self, tmp_path: Path) -> None:
        steps = MAX_SAMPLES // 8
        page = Page(write_report(steps_of(tmp_path, "ocr", steps + 50, 8)))
        assert f"{steps} of {steps + 50} validations are shown." in page.words()
        (slider,) = [tag for tag in page.all("input") if "data-steps" in tag]
        shown = [0, *map(int, slider["data-steps"].split(","))]
        assert len(shown) == steps and shown[-1] == steps + 49
        assert page.source.count('<div class="frame">') == MAX_SAMPLES // 8 * 8 + 2 * 2  # plus the best and worst

    def test_the_best_and_the_worst_with_their_scores(self, tmp_path: Path) -> None:
        words = Page(write_report(steps_of(tmp_path, "ocr", 2, 12))).words()
        best, worst = (
            words.split("best and worst of the 12 samples of step 1 Best ")[1].split("Curves")[0].split("Worst ")
        )
        assert re.findall(r"p(\d+) Step 1 (\S+) ocr (\S+) · clip 2", best) == [
            ("11", "12.000", "1.375"),
            ("10", "11.000", "1.25"),
            ("9", "10.000", "1.125"),
        ]
        assert re.findall(r"p(\d+) Step 1 (\S+) ocr (\S+) · clip 2", worst) == [
            ("0", "1.000", "0"),
            ("1", "2.000", "0.125"),
            ("2", "3.000", "0.25"),
        ]

    def test_an_only_score_that_is_the_reward_is_not_said_twice(self, tmp_path: Path) -> None:
        with logger(tmp_path) as log:
            log.records(0, "a", [Record("p", 0.5, "text", i, scores={"ocr": 0.5 - 0.25 * i}) for i in range(2)])
        assert "p text Step 0 0.500 p text Step 0 0.500 ocr 0.25" in Page(write_report(tmp_path)).words()

    def test_samples_without_a_reward_are_neither_best_nor_worst(self, tmp_path: Path) -> None:
        with logger(tmp_path) as log:
            log.records(0, "math", [Record(f"p{i}", float("nan") if i < 5 else i, "text", i) for i in range(9)])
        words = Page(write_report(tmp_path)).words()
        assert "best and worst of the 4 samples of step 0 Best p8 text Step 0 8.000 Worst p5 text Step 0 5.000" in words
        assert words.count("no reward") == 5

    def test_videos_play_where_they_are_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        clip = np.stack([picture(k, 16, 16) for k in range(4)])
        with logger(tmp_path) as log:
            log.records(0, "wan", [Record("a", 0.5, clip, 0, fps=4)])
        page = Page(write_report(tmp_path))
        (video,) = page.all("video")
        data = base64.b64decode(video["src"].removeprefix("data:video/mp4;base64,"))
        assert data == (tmp_path / "images/wan/step_000000/00000.mp4").read_bytes()
        monkeypatch.setattr("phalanx.tools.board.samples.MAX_VIDEO_BYTES", len(data) - 1)
        page = Page(write_report(tmp_path))
        assert (len(page.all("video")), len(page.all("img"))) == (0, 1)


def test_a_long_run_stays_small_and_says_that_it_averages(tmp_path: Path) -> None:
    names = ["reward/mean", "reward/std", "time/rollout", *(f"actor/metric_{k}" for k in range(40))]
    values = np.random.default_rng(0).normal(size=(10_000, len(names))).tolist()
    rows = [json.dumps({"step": k, **dict(zip(names, row, strict=True))}) for k, row in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    path = write_report(tmp_path)
    assert path.stat().st_size < 2 << 20
    page = Page(path)
    assert "Each point is the mean of 10 steps at most." in page.words()
    sizes = {len(series["x"]) for chart in page.charts() for series in chart["series"]}
    assert sizes == {MAX_POINTS, MAX_BARS}
