"""Built-in and custom loggers; the real files of TensorBoard and wandb are read back."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from PIL import Image

from phalanx.config.messages import ConfigError
from phalanx.telemetry.loggers import check_loggers
from phalanx.telemetry.records import Record
from tests.helpers.logs import TALK, prompt_image, records, rows, start, talk, texts

SRC = Path(__file__).parents[2] / "src"

FORMS = "module:Class or path/to/file.py:Class"
BUILT_IN = "console, mlflow, swanlab, tensorboard, trackio, wandb"
OWN = """
from phalanx.telemetry.loggers import Logger

number = 3


class Lines(Logger):
    \"\"\"Lines in a file; an id that a resumed run hears of again.\"\"\"

    def __init__(self, start):
        self.file = open(start.trainer.output_dir + "/own.txt", "a")
        self.id = start.id or "first"
        self.write("open", start.id, start.step, start.total_steps, start.config["trainer"]["seed"])

    def write(self, *words):
        print(*words, file=self.file, flush=True)

    def log(self, step, row):
        self.write(step, row["x"])

    def records(self, step, set_name, records, folder):
        self.write(step, set_name, len(records), folder.name)

    def close(self, failed):
        self.write("close", failed)


class Appended(Lines):
    append_only = True


class Broken(Lines):
    def log(self, step, row):
        raise RuntimeError("no\\nlog")


class Unstarted(Logger):
    def __init__(self, start):
        raise RuntimeError("no\\nstart")


class Other:
    pass
"""


class TestNames:
    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("wanbd", " did you mean wandb?"),
            ("jsonl", ""),
            ("Console", " did you mean console?"),
            ("__init__", ""),
            ("", ""),
        ],
    )
    def test_an_unknown_name_is_refused(self, name: str, hint: str) -> None:
        with pytest.raises(ValueError) as error:
            check_loggers(["console", name])
        known = f"built in: {BUILT_IN}; or give {FORMS}"
        assert str(error.value) == f"trainer.logger: {name!r} is not a built-in logger;{hint} {known}"

    def test_the_logger_refuses_it_too_on_every_rank(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError):
            start(tmp_path, "jsonl", enabled=False)

    @pytest.mark.parametrize("name", ["mlflow", "swanlab", "tensorboard", "trackio", "wandb"])
    def test_a_missing_package_is_named(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError) as error:
            check_loggers([name])
        assert str(error.value) == f"trainer.logger: the package {name} is not installed; pip install 'phalanx[{name}]'"

    def test_configurations_are_checked_without_torch(self) -> None:
        code = (
            "import sys, phalanx.run.telemetry.run_logger as m; m.check_loggers(['console', 'wandb', 'tensorboard'])\n"
        )
        code += "print(sorted({'torch', 'wandb', 'tensorboard', 'rich'} & set(sys.modules)))"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True
        )
        assert done.stdout == "[]\n", done.stderr

    def test_what_is_wrong_with_a_logger_of_ones_own(self, tmp_path: Path) -> None:
        file = tmp_path / "own.py"
        file.write_text(OWN)
        for entry, message in (
            (f"{file}:Linse", f"={f'{file}:Linse'!r}: {file} has no 'Linse'; did you mean Lines?"),
            (f"{file}:", f"={f'{file}:'!r} names no class; expected {FORMS}"),
            (
                f"{file}:number",
                f"={f'{file}:number'!r} is not a class derived from Logger of phalanx.telemetry.loggers",
            ),
            (f"{file}:Other", f"={f'{file}:Other'!r} is not a class derived from Logger of phalanx.telemetry.loggers"),
            (f"{tmp_path}/no.py:A", f": '{tmp_path}/no.py': no such file"),
            ("no_such:A", f"='no_such:A': no module 'no_such' on the Python path; expected {FORMS}"),
        ):
            with pytest.raises(ConfigError) as error:
                check_loggers([entry])
            assert str(error.value) == f"trainer.logger{message}"


class TestOwn:
    """Custom loggers, from a file or a module."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "own_loggers.py"
        path.write_text(OWN)
        return path

    def test_it_hears_of_everything(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        entry = "own_loggers:Lines"
        with start(tmp_path, entry, f"{file}:Lines") as log:
            log.records(0, "ocr", records(2))
            log.log(1, {"x": 5})
            ids = log.ids
        assert ids == {entry: "first", f"{file}:Lines": "first"}
        with pytest.raises(KeyError), start(tmp_path, entry, step=1, ids={entry: "kept", "other": "stays"}) as log:
            assert log.ids == {entry: "kept", "other": "stays"}
            raise KeyError
        lines = (tmp_path / "own.txt").read_text().splitlines()
        once = ["open None 0 4 3", "0 ocr 2 step_000000", "1 5", "close False"]
        assert lines == [line for line in once for _ in range(2)] + ["open kept 1 4 3", "close True"]

    def test_a_store_that_takes_nothing_back_gets_no_step_twice(self, file: Path, tmp_path: Path) -> None:
        entry = f"{file}:Appended"
        with start(tmp_path, entry) as log:
            for step in range(4):
                log.log(step, {"x": step})
        for ids in ({entry: "first"}, {}):  # without an id in the checkpoint, the logger starts a new run
            (tmp_path / "own.txt").unlink()
            with start(tmp_path, entry, step=1, ids=ids) as log:
                for step in (2, 3, 4):
                    log.records(step, "ocr", records(1))
                    log.log(step, {"x": 10 * step})
            lines = (tmp_path / "own.txt").read_text().splitlines()[1:-1]
            every = [f"{step} {what}" for step in (2, 3, 4) for what in (f"ocr 1 step_00000{step}", 10 * step)]
            assert lines == (every[4:] if ids else every)
        assert [row["x"] for row in rows(tmp_path)] == [0, 1, 20, 30, 40]

    def test_whatever_it_raises_costs_no_job(
        self, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with start(tmp_path, "console", f"{file}:Broken") as log:
            log.log(1, {"x": 1, "reward/mean": 0.5})
            log.log(2, {"x": 2, "reward/mean": 0.5})
        assert caplog.messages == [f"the logger {file}:Broken is switched off: RuntimeError: no log"]
        assert (tmp_path / "own.txt").read_text() == "open None 0 4 3\n"
        assert len(capsys.readouterr().out.splitlines()) == len(rows(tmp_path)) == 2

    def test_one_that_cannot_start_ends_those_that_did(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
        with pytest.raises(ConfigError) as error:
            start(tmp_path, "console", f"{file}:Lines", f"{file}:Unstarted")
        assert (
            str(error.value)
            == f"trainer.logger: {file}:Unstarted could not start: RuntimeError: no start, at {file}:39"
        )
        assert (tmp_path / "own.txt").read_text() == "open None 0 4 3\nclose True\n"
        assert rows(tmp_path) == [{"step": 9}]
        assert capsys.readouterr() == ("", "")


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


class TestTensorBoard:
    def test_scalars_images_and_resume(self, tmp_path: Path) -> None:
        with start(tmp_path, "tensorboard") as log:
            log.log(0, {"val/ocr/reward/mean": 0.5})
            log.records(0, "ocr", records())
            for step in (1, 2, 3):
                log.log(step, {"reward/mean": step / 8})
        with start(tmp_path, "tensorboard", step=2) as log:
            log.log(3, {"reward/mean": 0.75})
            log.log(4, {"reward/mean": 1.0})
        events = read_events(tmp_path)
        rewards = [(event.step, event.value) for event in events.Scalars("reward/mean")]
        assert rewards == [(1, 0.125), (2, 0.25), (3, 0.75), (4, 1.0)]
        assert [(e.step, e.value) for e in events.Scalars("val/ocr/reward/mean")] == [(0, 0.5)]
        (image,) = events.Images("images/ocr")
        with Image.open(tmp_path / "images/ocr/step_000000/grid.png") as picture:
            assert (image.step, image.width, image.height) == (0, *picture.size)
        assert b'"seed": 3' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]

    def test_texts(self, tmp_path: Path) -> None:
        with start(tmp_path, "tensorboard") as log:
            log.records(3, "math", texts())
            log.records(3, "tools", [talk()])
            log.records(3, "seen", [Record("a", 0.5, "x", 0, images=(prompt_image(),) * 2), Record("b", 0.5, "y", 1)])
        events = read_events(tmp_path)
        assert events.Tags()["images"] == ["samples/seen"]
        with Image.open(BytesIO(events.Images("samples/seen")[0].encoded_image_string)) as seen:
            assert (
                seen.getpixel((50, 20)) == (200, 200, 200) and min(seen.crop((0, 60, *seen.size)).getextrema()[0]) < 99
            )
        (event,) = events.Tensors("samples/math/text_summary")
        assert event.step == 3
        shown = event.tensor_proto.string_val[0].decode().split("\n\n---\n\n")
        # code blocks, in which markdown is not interpreted
        assert shown[1] == (
            "**prompt**\n\n    What is 1 + *1*?\n\n**reward 0.250**\n\n    # 1\n\n      <b>2</b> \\ | 二"
            "\n\n**ground truth**\n\n    *2*"
        )
        assert len(shown) == 2
        (event,) = events.Tensors("samples/tools/text_summary")
        shown = event.tensor_proto.string_val[0].decode()
        assert shown == f"**prompt**\n\n    2 * 3?\n\n**reward 0.500**\n\n{indent(TALK, '    ')}"


class TestWandb:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        import wandb

        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        wandb.teardown()  # wandb reads the environment once per process
        yield
        wandb.teardown()

    def test_an_offline_run_and_its_continuation(self, tmp_path: Path) -> None:
        import wandb

        with start(tmp_path, "wandb") as log:
            name = log.ids["wandb"]
            log.log(1, {"reward/mean": 0.25, "x": float("nan")})
            log.records(1, "ocr", records(2))
        assert name
        with start(tmp_path, "wandb", step=1, ids={"wandb": name}) as log:
            assert log.ids == {"wandb": name}
            log.log(2, {"reward/mean": 0.5})
        wandb.teardown()  # an offline run is completely on disk only after wandb's process has ended
        files = (tmp_path / "wandb").glob(f"offline-run-*-{name}*/run-{name}.wandb")
        written = [record for file in files for record in wandb_records(file)]
        assert {r.run.run_id for r in written if r.WhichOneof("record_type") == "run"} == {name}
        assert {r.run.project for r in written if r.WhichOneof("record_type") == "run"} == {"p"}
        history = [history_row(r) for r in written if r.WhichOneof("record_type") == "history"]
        history.sort(key=lambda row: row["_step"])
        assert [(h["_step"], h["reward/mean"]) for h in history] == [(1, 0.25), (2, 0.5)]
        assert history[0]["images/ocr/captions"] == ['0.000: a sign that says "0"', '0.100: a sign that says "1"']

    def test_texts_are_a_table(self, tmp_path: Path) -> None:
        import wandb

        with start(tmp_path, "wandb") as log:
            log.records(3, "math", texts())
            log.records(3, "tools", [talk()])
            log.records(3, "seen", [Record("a", 0.5, "x", 0, images=(prompt_image(),)), Record("b", 0.5, "y", 1)])
        wandb.teardown()
        tables = []
        for name in ("math", "tools", "seen"):
            (file,) = (tmp_path / "wandb").glob(f"offline-run-*/files/media/table/samples/{name}_*.table.json")
            tables.append(json.loads(file.read_text()))
        table, talks, seen = tables
        assert seen["columns"] == ["step", "prompt", "text", "ground_truth", "reward", "images"]
        assert [row[-1] for row in seen["data"]] == ["Image", None]  # the table's artifact contains the image
        assert talks["columns"] == ["step", "prompt", "text", "ground_truth", "reward", "messages"]
        assert talks["data"] == [[3, "2 * 3?", "<b>6</b>", None, 0.5, TALK]]
        assert table["columns"] == ["step", "prompt", "text", "ground_truth", "reward", "reward/exact"]
        assert table["data"] == [
            [3, record.prompt, record.output, record.ground_truth, record.reward, record.scores["exact"]]
            for record in texts()
        ]

    def test_no_account_is_told_in_a_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import wandb

        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.delenv("WANDB_API_KEY", raising=False)
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        wandb.teardown()
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 9}\n')
        with pytest.raises(ConfigError) as error:
            start(folder, "wandb")
        message = str(error.value)
        assert message.startswith("trainer.logger: wandb could not start: No API key configured.")
        assert message.endswith("; run `wandb login`, set WANDB_MODE=offline, or leave wandb out")
        assert "\n" not in message
        assert rows(folder) == [{"step": 9}]  # a failed start does not touch the older run


def wandb_records(path: Path) -> list[Any]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, position, found, part = path.read_bytes(), 7, [], b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def history_row(record: Any) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
