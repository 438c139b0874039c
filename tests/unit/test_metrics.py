"""Timers, metrics.jsonl and the loggers, with real wandb (offline) and tensorboard files read back."""

import json
import logging
import os
import pty
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phalanx.config.load import ConfigError
from phalanx.config.run import TrainerConfig
from phalanx.media.grids import CAPTION_LINES, TILE_MAX, TILE_MIN
from phalanx.telemetry.metrics import RunLogger, Timers, check_loggers, read_metrics
from phalanx.telemetry.records import Record, grid, read_index, save_records
from phalanx.training.job import validation_summary

SRC = Path(__file__).parents[2] / "src"


def trainer(folder: Path, *loggers: str) -> TrainerConfig:
    return TrainerConfig(output_dir=str(folder), logger=list(loggers), project_name="p", experiment_name="e")


def start(
    folder: Path, *loggers: str, step: int = 0, ids: dict[str, str] | None = None, enabled: bool = True
) -> RunLogger:
    return RunLogger(trainer(folder, *loggers), {"trainer": {"seed": 3}}, ids or {}, step, 4, enabled)


def rows(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl as strict JSON, without the clock."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse) for line in lines]
    return [{key: value for key, value in row.items() if key != "perf/elapsed_s"} for row in found]


def records(count: int = 3, height: int = 6, width: int = 9) -> list[Record]:
    rng = np.random.default_rng(0)
    return [
        Record(f'a sign that says "{i}"', i / 10, rng.integers(0, 256, (height, width, 3), dtype=np.uint8), i)
        for i in range(count)
    ]


def texts(count: int = 2) -> list[Record]:
    """Completions of some lines, with characters that markdown, HTML and JSON give a meaning."""
    return [
        Record(
            f"What is {i} + *1*?",
            i / 4,
            f"# {i}\n\n  <b>{i + 1}</b> \\ | 二",
            i,
            scores={"exact": i / 2},
            ground_truth=f"*{i + 1}*",
        )
        for i in range(count)
    ]


class TestTimers:
    def test_phases_add_up_and_pop_starts_anew(self) -> None:
        timers = Timers()
        for _ in range(2):
            with timers("rollout"):
                time.sleep(0.02)
        with timers("update"):
            pass
        timers.add("reward", 1.5)
        seconds = timers.pop()
        assert list(seconds) == ["time/rollout", "time/update", "time/reward"]
        assert 0.04 <= seconds["time/rollout"] < 0.5
        assert seconds["time/update"] < 0.02
        assert seconds["time/reward"] == 1.5
        assert timers.pop() == {}

    def test_a_phase_that_raises_is_counted(self) -> None:
        timers = Timers(sync=True)
        with pytest.raises(KeyError), timers("rollout"):
            time.sleep(0.01)
            raise KeyError
        assert timers.pop()["time/rollout"] >= 0.01


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
        code = "import sys, phalanx.telemetry.metrics as m; m.check_loggers(['console', 'wandb', 'tensorboard'])\n"
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
    """Loggers of one's own, from a file or a module."""

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
        for ids in ({entry: "first"}, {}):  # where the checkpoint knows nothing of it, there is nothing to take back
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
        assert caplog.messages == [f"the logger {file}:Broken is off from here on: RuntimeError: no log"]
        assert (tmp_path / "own.txt").read_text() == "open None 0 4 3\n"
        assert len(capsys.readouterr().out.splitlines()) == len(rows(tmp_path)) == 2

    def test_one_that_cannot_start_ends_those_that_did(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
        with pytest.raises(ConfigError) as error:
            start(tmp_path, "console", f"{file}:Lines", f"{file}:Unstarted")
        assert str(error.value) == f"trainer.logger: {file}:Unstarted could not start: RuntimeError: no start"
        assert (tmp_path / "own.txt").read_text() == "open None 0 4 3\nclose True\n"
        assert rows(tmp_path) == [{"step": 9}]
        assert capsys.readouterr() == ("", "")


class TestMetricsFile:
    def test_rows_are_strict_json_and_step_comes_first(self, tmp_path: Path) -> None:
        with start(tmp_path) as log:
            log.log(0, {"val/ocr/reward/mean": 0.5})
            log.log(1, {"reward/mean": float("nan"), "actor/lr": float("inf"), "n": 3, "x": np.float32(0.25)})
            # Each row is on disk at once.
            assert rows(tmp_path)[1] == {"step": 1, "reward/mean": None, "actor/lr": None, "n": 3, "x": 0.25}
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert lines[0].startswith('{"step": 0, "val/ocr/reward/mean": 0.5, "perf/elapsed_s": ')
        assert len(lines) == 2

    def test_a_resumed_run_drops_what_it_will_repeat(self, tmp_path: Path) -> None:
        with start(tmp_path) as log:
            for step in range(4):
                log.log(step, {"x": step})
        with start(tmp_path, step=2) as log:
            assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]
            log.log(3, {"x": 30})
            log.log(4, {"x": 40})
        assert [(row["step"], row["x"]) for row in rows(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 30), (4, 40)]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]

    def test_a_new_run_drops_all(self, tmp_path: Path) -> None:
        with start(tmp_path) as log:
            log.log(0, {"x": 1})
            log.log(7, {"x": 1})
        with start(tmp_path) as log:
            log.log(1, {"x": 2})
        assert rows(tmp_path) == [{"step": 1, "x": 2}]

    def test_a_half_written_last_line_is_mended(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"step": 2, "x"')
        with start(tmp_path, step=2) as log:
            log.log(3, {"x": 3})
        assert rows(tmp_path) == [{"step": 1, "x": 1}, {"step": 3, "x": 3}]
        assert caplog.records == []

    def test_another_broken_line_is_told(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n\nnonsense\n{"x": 1}\n{"step": 2}\n')
        with caplog.at_level(logging.WARNING):
            assert read_metrics(path) == [{"step": 1}, {"step": 2}]
        assert caplog.messages == [
            f"{path}:{line}: not a JSON object with a step; the line is left out" for line in (3, 4)
        ]

    def test_steps_only_grow(self, tmp_path: Path) -> None:
        with start(tmp_path) as log:
            log.log(3, {"x": 1})
        with start(tmp_path, step=3) as log, pytest.raises(AssertionError, match="row of step 3 after one of step 3"):
            log.log(3, {"x": 1})

    def test_the_clock_goes_on_after_a_resume(self, tmp_path: Path) -> None:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "perf/elapsed_s": 100.0}\n')
        with start(tmp_path, step=1) as log:
            log.log(2, {})
        assert 100 <= read_metrics(tmp_path / "metrics.jsonl")[-1]["perf/elapsed_s"] < 101

    def test_other_ranks_write_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "run"
        with start(folder, "console", "tensorboard", "wandb", ids={"wandb": "abc"}, enabled=False) as log:
            log.log(1, {"reward/mean": 1})
            log.log(1, {"reward/mean": 1})
            log.records(1, "ocr", records())
            assert log.ids == {"wandb": "abc"}
        assert not folder.exists()
        assert capsys.readouterr() == ("", "")


class TestConsole:
    def test_a_line_a_step_without_a_terminal(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with start(tmp_path, "console") as log:
            log.log(0, {"val/ocr/reward/mean": 0.5, "time/validation": 1})
            log.log(1, {"reward/mean": 0.25, "actor/grad_norm": 0.5, "other": 1.0, "perf/step_s": 12.5})
            log.log(4, {"reward/mean": 0.75, "val/ocr/reward/mean": 0.9, "val/ocr/reward/std": 0.1})
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "step 0/4  validation  ocr/reward/mean 0.5000"
        assert re.fullmatch(
            r"step 1/4  reward/mean 0\.25  actor/grad_norm 0\.5  perf/step_s 12\.5  ETA 0:00:0\d", lines[1]
        )
        assert lines[2:] == [
            "step 4/4  reward/mean 0.75  ETA 0:00:00",
            "step 4/4  validation  ocr/reward/mean 0.9000  ocr/reward/std 0.1000",
        ]

    def test_the_eta_is_the_mean_step_times_those_left(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [0.0]
        monkeypatch.setattr("phalanx.telemetry.loggers.console.time", SimpleNamespace(monotonic=lambda: now[0]))
        with RunLogger(trainer(tmp_path, "console"), {}, {}, 10, 100, True) as log:
            for step, now[0] in (11, 100.0), (12, 160.0):
                log.log(step, {"reward/mean": 0.0})
        lines = capsys.readouterr().out.splitlines()
        # 100 s for the first step; 160 s for both, 80 s each.
        assert lines == ["step 11/100  reward/mean 0  ETA 2:28:20", "step 12/100  reward/mean 0  ETA 1:57:20"]

    def test_a_terminal_shows_what_the_job_is_at_below_the_rows(self, tmp_path: Path) -> None:
        """Rows and warnings stay, each once and in one piece; below them a line tells phase, micro-batch and time."""
        screen, _, _ = shown(LOOP, tmp_path, "stdout", "stderr")
        lines = [line.rstrip("\r").rpartition("\x1b[2K")[2] for line in screen.split("\n")]
        left = [line for line in lines if "\x1b" not in line and line]
        assert [line.partition("  ETA")[0] for line in left] == [*ROWS[:2], "WARNING: careful", ROWS[2]]
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
        for done, phase in (
            (0, "rollout 1/3"),
            (0, "rollout 2/3"),
            (0, "reward"),
            (1, "update 2/2"),
            (1, "validation 1"),
        ):
            assert re.search(rf"step {done}/2 done \S+ {phase} 0:00:0\d", plain), phase
        assert screen.endswith("\x1b[?25h")  # the cursor is shown

    @pytest.mark.parametrize("terminals", [(), ("stdout",), ("stderr",)])
    def test_without_a_terminal_rows_are_plain(self, terminals: tuple[str, ...], tmp_path: Path) -> None:
        screen, out, err = shown(LOOP, tmp_path, *terminals)
        rows = screen.replace("\r\n", "\n") if "stdout" in terminals else out
        assert [line.partition("  ETA")[0] for line in rows.splitlines()] == ROWS
        assert not {"\r", "\x1b"} & set(rows)
        if "stderr" in terminals:
            assert "rollout 1/3" in screen
        else:
            assert err == "WARNING: careful\n"

    def test_phases_nest(self) -> None:
        timers = Timers()
        with timers("rollout"):
            timers.expect(3)
            timers.advance()
            with timers("judge"):
                assert str(timers.phase) == "judge"
            assert str(timers.phase) == "rollout 1/3"
        assert str(timers.phase) == ""


LOOP = """
import logging, sys, time
from phalanx.cli import _Terminal
from phalanx.telemetry.metrics import RunLogger, Timers, TrainerConfig

logging.basicConfig(format="%(message)s", handlers=[_Terminal()])
timers = Timers()

def work(name, done, expected=0):
    with timers(name):
        timers.expect(expected)
        for _ in range(done):
            timers.advance()
            time.sleep(0.6)  # two views of it
        time.sleep(0 if done else 0.6)

numbers = {"actor/ratio_mean": 1.0, "actor/clipfrac": 0.5, "actor/grad_norm": 0.5, "perf/step_s": 12.5}
with RunLogger(TrainerConfig(output_dir=sys.argv[1]), {}, {}, 0, 2, True, timers) as log:
    log.log(0, {"val/ocr/reward/mean": 0.5})
    work("rollout", 2, 3)
    work("reward", 0)
    log.log(1, {"reward/mean": 0.25, **numbers})
    logging.warning("careful")
    work("update", 2, 2)
    work("validation", 1)
    log.log(2, {"reward/mean": 0.5, **numbers})
"""
NUMBERS = "actor/ratio_mean 1  actor/clipfrac 0.5  actor/grad_norm 0.5  perf/step_s 12.5"  # wider than the terminal
ROWS = [
    "step 0/2  validation  ocr/reward/mean 0.5000",
    f"step 1/2  reward/mean 0.25  {NUMBERS}",
    f"step 2/2  reward/mean 0.5  {NUMBERS}",
]


def shown(code: str, folder: Path, *terminals: str) -> tuple[str, str, str]:
    """What a script shows on a terminal, which these of its streams are, and the rest of stdout and stderr."""
    master, slave = pty.openpty()
    streams = {name: slave if name in terminals else subprocess.PIPE for name in ("stdout", "stderr")}
    environment = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], env=environment, **streams) as process:
        os.close(slave)
        screen = b"".join(read_all(master))
        out, err = process.communicate()
    os.close(master)
    assert process.returncode == 0, (screen, err)
    return screen.decode(), (out or b"").decode(), (err or b"").decode()


def read_all(descriptor: int) -> Iterator[bytes]:
    """What a pseudo-terminal shows until its other side is closed."""
    while select.select([descriptor], [], [], 30)[0]:
        try:
            data = os.read(descriptor, 4096)
        except OSError:  # Linux: the other side is closed
            return
        if not data:
            return
        yield data


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
        events = read_events(tmp_path)
        (event,) = events.Tensors("samples/math/text_summary")
        assert event.step == 3
        shown = event.tensor_proto.string_val[0].decode().split("\n\n---\n\n")
        # code blocks, in which markdown means nothing
        assert shown[1] == (
            "**prompt**\n\n    What is 1 + *1*?\n\n**reward 0.250**\n\n    # 1\n\n      <b>2</b> \\ | 二"
            "\n\n**ground truth**\n\n    *2*"
        )
        assert len(shown) == 2


class TestWandb:
    @pytest.fixture(autouse=True)
    def offline(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        import wandb

        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        wandb.teardown()  # it reads the environment once a process
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
        wandb.teardown()  # the end of an offline run is on disk when wandb's own process has ended
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
        wandb.teardown()
        (file,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/samples/math_*.table.json")
        table = json.loads(file.read_text())
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
        assert rows(folder) == [{"step": 9}]  # a start that fails leaves the older run alone


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


class TestImages:
    def test_files_and_index(self, tmp_path: Path) -> None:
        given = records()
        given[1] = Record("日本語 <b>", float("nan"), given[1].output, 7, scores={"ocr": 0.5, "clip": float("inf")})
        with start(tmp_path) as log:
            log.records(10, "ocr", reversed(given))
        folder = tmp_path / "images/ocr/step_000010"
        names = ["00000.png", "00002.png", "00007.png", "grid.png", "index.jsonl"]
        assert sorted(p.name for p in folder.iterdir()) == names
        index = [json.loads(line) for line in (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()]
        assert index == [
            {"index": 0, "prompt": 'a sign that says "0"', "reward": 0.0, "file": "00000.png"},
            {"index": 2, "prompt": 'a sign that says "2"', "reward": 0.2, "file": "00002.png"},
            {
                "index": 7,
                "prompt": "日本語 <b>",
                "reward": None,
                "scores": {"ocr": 0.5, "clip": None},
                "file": "00007.png",
            },
        ]
        with Image.open(folder / "00007.png") as image:
            assert np.array_equal(np.asarray(image), given[1].output)

    def test_a_later_start_replaces_the_folder(self, tmp_path: Path) -> None:
        save_records(tmp_path, 1, "ocr", records(5))
        folder = save_records(tmp_path, 1, "ocr", records(1))
        assert sorted(p.name for p in folder.iterdir()) == ["00000.png", "grid.png", "index.jsonl"]
        assert [p.name for p in folder.parent.iterdir()] == ["step_000001"]

    def test_no_images(self, tmp_path: Path) -> None:
        folder = save_records(tmp_path, 1, "ocr", [])
        assert [p.name for p in folder.iterdir()] == ["index.jsonl"]

    def test_long_texts_and_escapes_are_harmless_on_the_console(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with start(tmp_path, "console") as log:
            log.records(1, "math", [Record("\x1b[2Jp", 0.5, "a" * 3000 + "end", 0)])
        said = capsys.readouterr().out
        assert "    \\x1b[2Jp\n" in said and " […] " in said and said.endswith("aaaend\n") and len(said) < 800

    def test_texts_stand_in_the_index(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """And the first one on the console."""
        given = [Record("a", float("nan"), "", 9), *texts()]
        with start(tmp_path, "console") as log:
            log.records(10, "math", given)
        assert capsys.readouterr().out == (
            "step 10/4  math, prompt 0, reward 0.000:\n    What is 0 + *1*?\n    # 0\n\n      <b>1</b> \\ | 二\n"
            "    ground truth: *1*\n"
        )
        assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "samples"]
        folder = tmp_path / "samples/math/step_000010"
        assert [p.name for p in folder.iterdir()] == ["index.jsonl"]
        lines = (folder / "index.jsonl").read_text(encoding="utf-8").splitlines()
        assert lines[0] == (
            r'{"index": 0, "prompt": "What is 0 + *1*?", "reward": 0.0, "scores": {"exact": 0.0}, '
            r'"ground_truth": "*1*", "text": "# 0\n\n  <b>1</b> \\ | 二"}'
        )
        assert [json.loads(line) for line in lines[1:]] == [
            json.loads(lines[0])
            | {"index": 1, "prompt": "What is 1 + *1*?", "reward": 0.25, "text": texts()[1].output}
            | {"scores": {"exact": 0.5}, "ground_truth": "*2*"},
            {"index": 9, "prompt": "a", "reward": None, "text": ""},
        ]
        assert read_index(folder, "text") == [json.loads(line) for line in lines]
        with pytest.raises(ValueError, match=r":1: not a row with index, prompt, reward and file$"):
            read_index(folder)

    def test_tiny_images_are_enlarged_by_whole_pixels_with_captions_below(self) -> None:
        (record,) = records(1, height=4, width=8)
        picture = np.asarray(grid([record]))
        factor = TILE_MIN // 8
        enlarged = record.frames[0].repeat(factor, 0).repeat(factor, 1)
        assert np.array_equal(picture[8 : 8 + 4 * factor, 8 : 8 + TILE_MIN], enlarged)
        below = picture[8 + 4 * factor :]
        assert (below < 128).any()  # text
        assert picture.shape[1] == TILE_MIN + 16

    def test_large_images_shrink_and_four_make_a_square(self) -> None:
        picture = grid(records(4, height=512, width=1024))
        assert picture.width == 2 * TILE_MAX + 3 * 8
        assert picture.height < 2 * (TILE_MAX // 2 + 17 * (CAPTION_LINES + 1)) + 5 * 8

    def test_long_prompts_and_long_words_stay_in_their_tile(self) -> None:
        image = np.full((160, 160, 3), 255, np.uint8)
        for prompt in ("word " * 300, "w" * 3000):
            picture = np.asarray(grid([Record(prompt, 1.0, image, 0)]))
            assert picture.shape[0] <= 160 + 17 * (CAPTION_LINES + 1) + 24
            assert (picture[:, -6:] == 255).all()  # nothing runs into the margin

    @pytest.mark.parametrize("image", [np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)])
    def test_another_layout_is_refused(self, tmp_path: Path, image: Any) -> None:
        with pytest.raises(ValueError) as error:
            save_records(tmp_path, 1, "ocr", [Record("a", 1.0, image, 2)])
        assert str(error.value) == (
            f"images: record 2 is {image.dtype} {list(image.shape)}; expected uint8 [H, W, 3], or [F, H, W, 3]"
        )

    @pytest.mark.parametrize("name", ["../x", "", ".."])
    def test_a_set_cannot_leave_its_folder(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ValueError) as error:
            save_records(tmp_path, 1, name, records())
        assert str(error.value) == f"images: {name!r} cannot name a validation set's folder; use a name without '/'"


def test_the_summary_of_a_single_validation_has_no_arrow(tmp_path: Path) -> None:
    rows = [{"step": 0, "val/a/reward/mean": 0.25}, {"step": 5, "reward/mean": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert validation_summary(tmp_path) == ["val/a/reward/mean: 0.250 (step 0)"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "val/a/reward/mean": 0.5}) + "\n")
    assert validation_summary(tmp_path) == ["val/a/reward/mean: 0.250 (step 0) -> 0.500 (step 9)"]
