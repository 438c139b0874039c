"""The HTML report: what it says, that it needs nothing else, and what it does where pieces are missing."""

import base64
import io
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from phalanx.config.run import TrainerConfig
from phalanx.telemetry.charts import MAX_BARS, MAX_POINTS, Series, line_chart, stacked_bars
from phalanx.telemetry.metrics import RunLogger
from phalanx.telemetry.records import Record
from phalanx.telemetry.report import MAX_PAIRS, main, write_report

SRC = Path(__file__).parents[2] / "src"
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """The page's tags with their attributes and its text; fails where tags do not close in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["title"]):
            self.text += " " + data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def words(self) -> str:
        return " ".join(self.text.split())


def picture(seed: int, height: int = 6, width: int = 12) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def logger(folder: Path) -> RunLogger:
    return RunLogger(TrainerConfig(output_dir=str(folder), logger=[]), {}, None, 0, 3, True)


def run(folder: Path, steps: int = 3) -> Path:
    """A run's folder as the loggers leave it."""
    with logger(folder) as log:
        log.log(0, {"val/ocr/reward/mean": 0.5, "val/easy/reward/mean": 0.9, "time/validation": 2.0})
        log.records(0, "ocr", [Record(f'sign "{i}" & <more>', 0.25, picture(i), i) for i in range(2)])
        for step in range(1, steps + 1):
            row = {"reward/mean": 0.1 * step, "reward/std": 0.05, "reward/max": 1.0, "reward/ocr": 0.1 * step}
            row |= {"actor/grad_norm": float("nan") if step == 2 else 0.5, "actor/ratio_mean": 1.0}
            row |= {"time/rollout": 3.0, "time/update": 1.0, "perf/images_per_gpu_per_s": 20.0}
            row |= {"val/ocr/reward/mean": 0.75, "val/easy/reward/mean": 0.8} if step == steps else {}
            log.log(step, row)
        log.records(steps, "ocr", [Record(f'sign "{i}" & <more>', 0.875, picture(10 + i), i) for i in range(2)])
    (folder / "config.yaml").write_text(
        "trainer:\n  experiment_name: my <run>\n  total_training_steps: 3\nmodel:\n  path: a/b\n"
    )
    return folder


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
    titles = re.findall(r'<figure class="chart"><figcaption>(.*?)</figcaption>', page.source)
    assert titles == [
        "Training reward",
        "Validation reward",
        "Reward terms",
        "Importance ratio",
        "Gradient norm",
        "Throughput (images per second and rank)",
        "Seconds by phase",
    ]
    assert "experiment_name: my <run>" in words  # the configuration, as text
    assert "reward/mean 0.1 0.3 0.1 0.3 3" in words  # the table
    assert "actor/grad_norm 0.5 0.5 0.5 0.5 2" in words  # NaN is no value


def test_the_same_prompts_stand_side_by_side(tmp_path: Path) -> None:
    page = Page(write_report(run(tmp_path)))
    images = page.all("img")
    assert [image["alt"] for image in images] == [
        'Before, reward 0.250: sign "0" & <more>',
        'After, reward 0.875: sign "0" & <more>',
        'Before, reward 0.250: sign "1" & <more>',
        'After, reward 0.875: sign "1" & <more>',
    ]
    for image, seed in zip(images, (0, 10, 1, 11), strict=True):
        kind, data = image["src"].split(",")
        assert kind == "data:image/png;base64"
        with Image.open(io.BytesIO(base64.b64decode(data))) as decoded:
            assert np.array_equal(np.asarray(decoded), picture(seed))
        assert image["class"] == "pixels"  # tiny images are not smoothed
    assert 'Before 0.250 After 0.875 sign "0" & <more>' in page.words()


def test_it_needs_no_network_and_describes_its_charts(tmp_path: Path) -> None:
    page = Page(write_report(run(tmp_path)))
    assert page.all("script") == page.all("link") == page.all("iframe") == []
    sources = [value for _, attributes in page.tags for key, value in attributes.items() if key in ("src", "href")]
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"https?:|url\(|@import", page.source)
    assert "prefers-color-scheme:dark" in page.source
    charts = page.all("svg")
    assert all(chart["role"] == "img" for chart in charts)
    assert charts[1]["aria-label"] == (
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
    assert page.all("script") == page.all("img") == page.all("b")[4:] == []  # only the rewards are bold
    assert "math: step 0 and step 1" in page.words()
    assert "Before 0.000 </pre> yes & done After 0.750 What is 1 < 2?" in page.words()
    assert "<pre>&lt;script&gt;1&lt;/script&gt;\n  no</pre>" in page.source  # line breaks and spaces stay
    assert "No validation samples" not in page.words()


def test_large_images_are_scaled(tmp_path: Path) -> None:
    with logger(tmp_path) as log:
        log.records(0, "ocr", [Record("a", 0.5, picture(0, 1024, 512), 0)])
    (image,) = Page(write_report(tmp_path)).all("img")
    kind, data = image["src"].split(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as decoded:
        assert decoded.size == (192, 384)
    assert "class" not in image


class TestMissingPieces:
    def test_no_rows(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").touch()
        words = Page(write_report(tmp_path)).words()
        assert words.startswith(f"{tmp_path.name} Training steps 0 metrics.jsonl has no rows yet.")
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
        assert len(page.all("svg")) == 1
        assert len(page.all("circle")) == 1

    def test_one_validation(self, tmp_path: Path) -> None:
        folder = run(tmp_path)
        rows = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text(rows[0] + "\n")
        page = Page(write_report(folder))
        words = page.words()
        assert "Validation · ocr 0.500 step 0 only" in words
        assert "No training step was logged." in words
        # The images of step 3 belong to a run that came further before it was started again.
        assert "Only the validation of step 0 kept images: nothing to compare with yet." in words
        assert [image["alt"][:6] for image in page.all("img")] == ["Before", "Before"]

    def test_an_image_that_was_deleted(self, tmp_path: Path) -> None:
        folder = run(tmp_path)
        (folder / "images/ocr/step_000003/00001.png").unlink()
        page = Page(write_report(folder))
        assert len(page.all("img")) == 3
        assert "image file is missing" in page.words()

    def test_many_prompts_are_cut_and_changed_prompts_are_not_compared(self, tmp_path: Path) -> None:
        with logger(tmp_path) as log:
            for name, word in ("a", "same"), ("b", "new"):
                log.records(0, name, [Record("same", 0.5, picture(0), i) for i in range(MAX_PAIRS + 3)])
                log.records(1, name, [Record(word, 0.5, picture(0), i) for i in range(MAX_PAIRS + 3)])
            log.log(1, {"reward/mean": 0.5})
        page = Page(write_report(tmp_path))
        assert len(page.all("img")) == 2 * MAX_PAIRS
        assert f"{MAX_PAIRS} of {MAX_PAIRS + 3} prompts are shown." in page.words()
        assert "b: step 0 and step 1 The two validations share no prompt." in page.words()

    def test_a_configuration_that_is_no_yaml_is_still_shown(self, tmp_path: Path) -> None:
        folder = run(tmp_path)
        (folder / "config.yaml").write_text("a: [1\n")
        assert "a: [1" in Page(write_report(folder)).words()


class TestCommand:
    def test_it_prints_the_path(self, tmp_path: Path) -> None:
        folder = run(tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "phalanx.telemetry.report", str(folder)],
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

    def test_a_broken_index_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = run(tmp_path) / "images/ocr/step_000003/index.jsonl"
        path.write_text('{"index": 0}\nnonsense\n')
        assert main([str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"error: {path}:1: not a row with index, prompt, reward and file\n"


def parsed(html: str) -> ElementTree.Element:
    """The SVG of a chart."""
    found = re.search(r"<svg.*</svg>", html, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found.group())


def points(svg: ElementTree.Element, tag: str) -> list[list[float]]:
    """The corners of the only element of this tag."""
    (shape,) = svg.findall(tag)
    return [[float(number) for number in point.split(",")] for point in shape.attrib["points"].split()]


class TestCharts:
    def test_higher_values_stand_higher_and_later_steps_further_right(self) -> None:
        svg = parsed(line_chart("t", [Series("a", [(1, 0.0), (2, 3.0), (4, 1.0)])]))
        (x1, y1), (x2, y2), (x3, y3) = points(svg, "polyline")
        assert x3 - x2 == pytest.approx(2 * (x2 - x1), abs=0.3)
        assert y1 - y3 == pytest.approx((y1 - y2) / 3, abs=0.3)
        assert 0 < y2 < y3 < y1 < 230

    def test_ticks_stand_at_their_values(self) -> None:
        svg = parsed(line_chart("t", [Series("a", [(0, 0.0), (10, 100.0)])]))
        (left, bottom), (right, top) = points(svg, "polyline")
        labels = [t for t in svg.findall("text") if t.text != "step"]
        values = {t.text: float(t.attrib["y"]) - 4 for t in labels if t.attrib["text-anchor"] == "end"}
        steps = {t.text: float(t.attrib["x"]) for t in labels if t.attrib["text-anchor"] == "middle"}
        wanted = {str(n): bottom + (top - bottom) * n / 100 for n in (0, 50, 100)}
        assert values == pytest.approx(wanted, abs=0.3)
        wanted = {str(n): left + (right - left) * n / 10 for n in (0, 2, 4, 6, 8, 10)}
        assert steps == pytest.approx(wanted, abs=0.3)

    def test_the_band_is_one_width_above_and_below(self) -> None:
        series = Series("a", [(0, 1.0), (1, 1.0)], [(0, 0.5), (1, 0.25)])
        svg = parsed(line_chart("t", [series]))
        _, middle = points(svg, "polyline")[0]
        up0, up1, down1, down0 = (middle - y for _, y in points(svg, "polygon"))
        assert up0 == pytest.approx(-down0, abs=0.2)
        assert up0 == pytest.approx(2 * up1, abs=0.3)
        assert down1 < 0 < up1

    def test_long_runs_are_averaged_and_say_so(self) -> None:
        html = line_chart("t", [Series("a", [(k, k % 2) for k in range(4 * MAX_POINTS)])], "Note.")
        line = points(parsed(html), "polyline")
        assert len(line) == MAX_POINTS
        assert len({y for _, y in line}) == 1  # each is the mean of 0, 1, 0, 1
        assert "Note. Each point is the mean of 4 steps." in html

    @pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-9, 3e12])
    def test_a_flat_curve_is_drawn_in_the_middle(self, value: float) -> None:
        svg = parsed(line_chart("t", [Series("a", [(k, value) for k in range(5)])]))
        assert [y for _, y in points(svg, "polyline")] == pytest.approx([106] * 5, abs=0.5)  # between 12 and 200
        assert len(svg.findall("text")) > 3

    def test_bars_are_stacked_to_the_sum(self) -> None:
        html = stacked_bars("t", [Series("a", [(1, 1.0), (2, 2.0)]), Series("b", [(1, 3.0), (2, 0.0)])])
        bars = [r for r in parsed(html).findall("rect") if r.attrib["class"] != "hit"]
        heights = [float(r.attrib["height"]) for r in bars]
        unit = heights[0]
        assert heights == [pytest.approx(unit * k, abs=0.4) for k in (1, 3, 2, 0)]
        assert float(bars[0].attrib["y"]) == pytest.approx(float(bars[1].attrib["y"]) + heights[1], abs=0.2)
        assert [r.attrib["class"] for r in bars] == ["f1", "f2", "f1", "f2"]

    def test_no_more_bars_than_fit(self) -> None:
        html = stacked_bars("t", [Series("a", [(k, 1.0) for k in range(1000)])])
        bars = [r for r in parsed(html).findall("rect") if r.attrib["class"] != "hit"]
        assert len(bars) <= MAX_BARS

    def test_each_step_has_a_tooltip(self) -> None:
        svg = parsed(line_chart("t", [Series("<a>", [(1, 0.5), (2, 0.25)]), Series("b", [(2, 1.0)])]))
        texts = [title.text for title in svg.iter("title")]
        assert texts == ["step 1\n<a> 0.5", "step 2\n<a> 0.25\nb 1"]

    def test_nothing_to_draw(self) -> None:
        assert line_chart("t", []) == stacked_bars("t", []) == ""
