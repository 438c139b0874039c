"""MLflow, Trackio and SwanLab: the real libraries, offline, and the contents of their stores."""

import json
import math
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image
from swanlab.proto.swanlab.record.v1.record_pb2 import Record as SwanlabRecord
from swanlab.sdk.internal.core_python.store import DataStoreReader

from phalanx.config.messages import ConfigError
from phalanx.config.run import RLConfig, TrainerConfig
from phalanx.media.videos import GIF_FRAMES
from phalanx.run.checkpoint_folder import read_meta
from phalanx.run.telemetry.run_logger import RunLogger
from phalanx.telemetry.records import Record, Thumbnail
from tests.helpers.ranks import run_ranks
from tests.helpers.toy import build, word_config

CONFIG = {"trainer": {"seed": 3, "logger": ["a", "b"]}, "optim": {}}


def start(folder: Path, name: str, step: int = 0, ids: dict[str, str] | None = None, project: str = "p") -> RunLogger:
    trainer = TrainerConfig(output_dir=str(folder), logger=[name], project_name=project, experiment_name="e")
    return RunLogger(trainer, CONFIG, ids or {}, step, 4, True)


def pictures(count: int = 2) -> list[Record]:
    return [Record(f"picture {i}", i / 4, np.full((6, 9, 3), 50 * i, np.uint8), i) for i in range(count)]


def videos(count: int = 2, frames: int = 20) -> list[Record]:
    """Frames of increasing brightness."""
    shades = np.arange(0, 10 * frames, 10, np.uint8)[:, None, None, None]
    moving = np.broadcast_to(shades, (frames, 16, 16, 3))
    return [Record(f"video {i}", i / 4, moving + i, i, fps=8) for i in range(count)]


def texts() -> list[Record]:
    return [Record("1 + 1?", 0.5, "# 2", 0, scores={"exact": 1.0}, ground_truth="2"), Record("2 + 2?", 0.0, "", 1)]


def seen() -> list[Record]:
    """Two samples; the prompt of one has two images."""
    pixels = np.full((6, 9, 3), 200, np.uint8)
    shown = Thumbnail("a.jsonl:1: images[0]", 60, 90, pixels)
    return [Record("a", 0.5, "x", 0, images=(shown, shown)), Record("b", 0.25, "y", 1)]


def two_starts(folder: Path, name: str, project: str = "p") -> str:
    """Log a run that is killed after step 3 and resumes from its checkpoint of step 1; returns its id."""
    log = start(folder, name, project=project)
    log.records(0, "ocr", pictures())
    log.log(0, {"val/ocr/reward/mean": 0.5})
    for step in (1, 2, 3):
        log.log(step, {"reward/mean": step / 8, "bad": math.nan, "odd": math.inf})
    log.close(failed=True)
    with start(folder, name, 1, log.ids, project) as again:
        assert again.ids == log.ids and set(log.ids) == {name}
        for step in (2, 3, 4):
            again.log(step, {"reward/mean": step / 8})
    return log.ids[name]


REWARDS = [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]


class TestMlflow:
    def client(self, folder: Path) -> MlflowClient:
        return MlflowClient(f"sqlite:///{folder}/mlflow.db")

    def history(self, folder: Path, run: str, key: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in self.client(folder).get_metric_history(run, key)]

    def test_a_run_and_its_continuation(self, tmp_path: Path) -> None:
        run = two_starts(tmp_path, "mlflow")
        client = self.client(tmp_path)
        assert [e.name for e in client.search_experiments(filter_string="name = 'p'")] == ["p"]
        (kept,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
        assert (kept.info.run_id, kept.info.run_name, kept.info.status) == (run, "e", "FINISHED")
        assert kept.data.params == {"trainer.seed": "3", "trainer.logger": "['a', 'b']", "optim": "{}"}
        assert self.history(tmp_path, run, "reward/mean") == REWARDS
        assert self.history(tmp_path, run, "val/ocr/reward/mean") == [(0, 0.5)]
        assert all(math.isnan(value) for _, value in self.history(tmp_path, run, "bad"))
        (file,) = (tmp_path / "mlflow").rglob("config.yaml")
        assert "seed: 3" in file.read_text()
        folder = file.parent / "images/ocr/step_000000"
        assert sorted(p.name for p in folder.iterdir()) == ["00000.png", "00001.png", "grid.png", "index.jsonl"]
        (step,) = [
            p for p in (file.parent / "images").glob("*.png") if p.name.startswith("images~ocr+step+0+")
        ]  # as MLflow's page shows it
        with Image.open(step) as shown, Image.open(folder / "grid.png") as grid:
            assert shown.size == grid.size

    def test_texts_and_names_that_it_refuses(self, tmp_path: Path) -> None:
        with start(tmp_path, "mlflow") as log:
            log.records(3, "math+", texts())
            log.records(3, "seen", seen())
            log.log(3, {"val/math+/reward/mean": 0.25})
        assert self.history(tmp_path, log.ids["mlflow"], "val/math_/reward/mean") == [(3, 0.25)]
        (picture,) = (tmp_path / "mlflow").rglob("images/samples~seen*.png")
        with Image.open(picture) as grid:
            assert grid.getpixel((50, 20)) == (200, 200, 200)
        (file,) = (tmp_path / "mlflow").rglob("math+/**/index.jsonl")
        assert file.parent.parts[-3:] == ("samples", "math+", "step_000003")
        assert [json.loads(line)["text"] for line in file.read_text().splitlines()] == ["# 2", ""]

    def test_a_run_that_another_store_had_begins_anew(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')  # the new run gets step 2 as well
        with start(tmp_path, "mlflow", 1, {"mlflow": "f" * 32}) as log:
            log.log(2, {"x": 1})
        assert log.ids["mlflow"] != "f" * 32
        assert self.history(tmp_path, log.ids["mlflow"], "x") == [(2, 1)]

    def test_a_store_that_fails_costs_no_job(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with start(tmp_path, "mlflow") as log:
            self.client(tmp_path).delete_run(log.ids["mlflow"])  # a deleted run accepts nothing
            log.log(1, {"x": 1})
        (warning,) = [text for text in caplog.messages if "logger" in text]
        assert warning.startswith("the logger mlflow is switched off: MlflowException: ") and "\n" not in warning
        assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1, "x": 1, ')

    def test_a_server_out_of_reach_is_told_in_a_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        with pytest.raises(ConfigError) as error:
            start(tmp_path, "mlflow")
        assert str(error.value).startswith("trainer.logger: mlflow could not start: MlflowException: API request to ")
        assert "\n" not in str(error.value)
        assert list(tmp_path.iterdir()) == []


class TestTrackio:
    def rows(self, folder: Path, project: str) -> list[tuple[str, int, dict[str, Any]]]:
        """The run, step and content of each row of a project."""
        with sqlite3.connect(folder / f"{project}.db") as store:
            rows = store.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        return [(run, step, json.loads(metrics)) for run, step, metrics in rows]

    def test_a_run_and_its_continuation(self, tmp_path: Path, trackio_folder: Path) -> None:
        run = two_starts(tmp_path, "trackio", "continued")
        rows = self.rows(trackio_folder, "continued")
        assert {name for name, _, _ in rows} == {run} and run.startswith("e-")
        assert [(step, row["reward/mean"]) for _, step, row in rows if "reward/mean" in row] == REWARDS
        assert [(step, row["val/ocr/reward/mean"]) for _, step, row in rows if "val/ocr/reward/mean" in row] == [
            (0, 0.5)
        ]
        with sqlite3.connect(trackio_folder / "continued.db") as store:
            ((config,),) = store.execute("SELECT config FROM configs").fetchall()
            ((runs,),) = store.execute("SELECT COUNT(DISTINCT run_id) FROM metrics").fetchall()
        assert json.loads(config)["trainer"] == CONFIG["trainer"] and runs == 1
        ((step, table),) = [(step, row["images/ocr"]["_value"]) for _, step, row in rows if "images/ocr" in row]
        assert step == 0 and [(row["prompt"], row["reward"]) for row in table] == [
            ("picture 0", 0),
            ("picture 1", 0.25),
        ]
        with Image.open(trackio_folder / "media" / table[1]["image"]["file_path"]) as image:
            assert image.size == (9, 6) and image.getpixel((0, 0)) == (50, 50, 50)

    def test_texts_and_videos(self, tmp_path: Path, trackio_folder: Path) -> None:
        with start(tmp_path, "trackio", project="samples") as log:
            log.records(3, "math", texts())
            log.records(3, "wan", videos())
            log.records(4, "seen", seen())
        rows = [row for _, step, row in self.rows(trackio_folder, "samples") if step == 3]
        assert rows[0]["samples/math"]["_value"][0] == {
            "prompt": "1 + 1?", "reward": 0.5, "reward/exact": 1.0, "ground_truth": "2", "text": "# 2"
        }  # fmt: skip
        ((_, _, row),) = [row for row in self.rows(trackio_folder, "samples") if row[1] == 4]
        first, second = row["samples/seen"]["_value"]
        assert second["images"] is None
        with Image.open(trackio_folder / "media" / first["images"]["file_path"]) as image:
            assert image.size == (18, 6) and image.getpixel((0, 0))[:3] == (200, 200, 200)
        media = [(key, value) for row in rows[1:] for key, value in row.items()]
        assert [key for key, _ in media] == ["videos/wan/00000", "videos/wan/00001"]
        assert media[1][1]["caption"] == "0.250: video 1"
        kept = (trackio_folder / "media" / media[1][1]["file_path"]).read_bytes()
        assert kept == (tmp_path / "images/wan/step_000003/00001.mp4").read_bytes()

    def test_another_run_of_the_name_is_another_run(self, tmp_path: Path, trackio_folder: Path) -> None:
        with start(tmp_path / "a", "trackio", project="same") as one:
            one.log(1, {"x": 1})
        with start(tmp_path / "b", "trackio", project="same") as other:
            other.log(1, {"x": 2})
        with start(tmp_path / "a", "trackio", 1, one.ids, "same") as one:
            one.log(2, {"x": 3})
        rows = [(run, step, row["x"]) for run, step, row in self.rows(trackio_folder, "same")]
        first, second = one.ids["trackio"], other.ids["trackio"]
        assert rows == [(first, 1, 1), (second, 1, 2), (first, 2, 3)]


class TestSwanlab:
    def written(self, folder: Path) -> list[list[SwanlabRecord]]:
        """The records of each start, in order."""
        starts = []
        for file in sorted(folder.glob("swanlab/run-*/*.swanlab")):
            reader, records = DataStoreReader(), []
            reader.open(str(file))
            for content in reader:
                records.append(SwanlabRecord())
                records[-1].ParseFromString(content)
            reader.close()
            starts.append(records)
        return starts

    def scalars(self, records: list[SwanlabRecord], key: str) -> list[tuple[int, float]]:
        scalars = [record.scalar for record in records if record.HasField("scalar")]
        return [(scalar.step, scalar.value.number) for scalar in scalars if scalar.key == key]

    def test_a_run_and_its_continuation(self, tmp_path: Path) -> None:
        """A run has two files: `swanlab sync` joins them, and the server drops steps that it already has."""
        run = two_starts(tmp_path, "swanlab")
        first, second = self.written(tmp_path)
        for records in (first, second):
            assert (records[0].start.id, records[0].start.project, records[0].start.name) == (run, "p", "e")
        assert self.scalars(first, "reward/mean") == REWARDS[:3]
        assert self.scalars(second, "reward/mean") == REWARDS[1:]
        assert self.scalars(first, "val/ocr/reward/mean") == [(0, 0.5)]
        ends = [records[-1].finish for records in (first, second)]
        assert ends[0].error == "the job failed" and not ends[1].error and ends[0].state != ends[1].state
        (media,) = [record.media for record in first if record.HasField("media")]
        assert (media.key, media.step) == ("images/ocr", 0)
        assert [item.caption for item in media.value.items] == ["0.000: picture 0", "0.250: picture 1"]
        configs = [file.read_text() for file in (tmp_path / "swanlab").glob("*/files/config.yaml")]
        assert len(configs) == 2 and all("seed" in config for config in configs)

    def test_texts_and_videos(self, tmp_path: Path) -> None:
        with start(tmp_path, "swanlab") as log:
            log.records(3, "math", texts())
            log.records(3, "wan", videos())
            log.records(3, "seen", seen())
        (records,) = self.written(tmp_path)
        media = {record.media.key: record.media for record in records if record.HasField("media")}
        shown = media.pop("samples/seen/images").value.items
        assert [item.caption for item in shown] == ["0.500: a"] and media.pop("samples/seen").value.items
        with Image.open(next(tmp_path.glob(f"swanlab/run-*/media/image/{shown[0].filename}"))) as image:
            assert image.size == (18, 6)
        assert set(media) == {"samples/math", "videos/wan"} and {item.step for item in media.values()} == {3}
        (folder,) = tmp_path.glob("swanlab/run-*/media")
        text = media["samples/math"].value.items[0]
        assert text.caption == "0.500: 1 + 1?" and (folder / "text" / text.filename).read_text() == "# 2"
        video = media["videos/wan"].value.items[1]
        with Image.open(folder / "image" / video.filename) as gif:
            assert gif.format == "GIF" and gif.size == (16, 16)
            assert gif.info["duration"] == pytest.approx(1000 * 20 / 8 / GIF_FRAMES, abs=10)

    def test_errors_and_ctrl_c_stay_the_jobs_own(self, tmp_path: Path) -> None:
        def of_the_job(*_: object) -> None:
            pass

        before = signal.getsignal(signal.SIGINT), sys.excepthook
        with start(tmp_path, "swanlab"):
            assert (signal.getsignal(signal.SIGINT), sys.excepthook) == before
            signal.signal(signal.SIGINT, of_the_job)  # as a running job does
        after = signal.signal(signal.SIGINT, before[0])
        assert after is of_the_job and sys.excepthook is before[1]

    def test_no_account_is_told_in_a_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SWANLAB_MODE", "online")
        with pytest.raises(ConfigError) as error:
            start(tmp_path, "swanlab")
        assert str(error.value).startswith("trainer.logger: swanlab could not start: Failed to initialize SwanLab in ")
        assert str(error.value).endswith("; run `swanlab login`, set SWANLAB_MODE=offline, or leave swanlab out")
        assert "\n" not in str(error.value)


def fit(cfg: RLConfig) -> None:
    build(cfg).fit()


def test_a_job_and_its_continuation(tmp_path: Path, trackio_folder: Path) -> None:
    """On two ranks, only the first one logs: each of the three trackers has one run with the rows of metrics.jsonl."""
    keys = ("trainer.logger=[mlflow,swanlab,trackio]", "trainer.save_freq=1", "trainer.project_name=job")
    keys += ("trainer.test_freq=1", f"data.val_files=[{tmp_path}/held_out.txt]")
    for steps in (1, 3):
        run_ranks(fit, 2, word_config(tmp_path, *keys, f"trainer.total_training_steps={steps}"), timeout=120)
    folder = tmp_path / "out"
    ids = read_meta(folder / "checkpoints" / "step_000003")["progress"]["logger_ids"]
    assert set(ids) == {"mlflow", "swanlab", "trackio"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for key in ("reward/mean", "val/held_out/reward/mean", "perf/elapsed_s"):
        expected = [(line["step"], line[key]) for line in lines if key in line]
        assert TestMlflow().history(folder, ids["mlflow"], key) == expected
        rows = TestTrackio().rows(trackio_folder, "job")
        assert [(step, row[key]) for run, step, row in rows if key in row and run == ids["trackio"]] == expected
        starts = TestSwanlab().written(folder)
        assert {records[0].start.id for records in starts} == {ids["swanlab"]}
        assert [point for records in starts for point in TestSwanlab().scalars(records, key)] == expected
