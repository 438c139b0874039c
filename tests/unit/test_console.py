"""The console logger, with and without a terminal."""

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.config.run import TrainerConfig
from phalanx.run.telemetry.run_logger import RunLogger
from phalanx.telemetry.loggers import RunStart
from phalanx.telemetry.timers import Timers
from phalanx.zoo.loggers.console import Eta, shown_keys
from tests.helpers.logs import start, trainer

SRC = Path(__file__).parents[2] / "src"


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

    def test_the_eta_is_the_median_step_times_those_left(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = [0.0]
        monkeypatch.setattr("phalanx.zoo.loggers.console.time", SimpleNamespace(monotonic=lambda: now[0]))
        with RunLogger(trainer(tmp_path, "console"), {}, {}, 10, 100, True) as log:
            for step, now[0] in (11, 100.0), (12, 160.0), (13, 220.0), (14, 380.0):
                log.log(step, {"reward/mean": 0.0})
        etas = [line.partition("  ETA ")[2] for line in capsys.readouterr().out.splitlines()]
        # 100 s for the first step, in which engines start; then the median of 60, of 60 and 60, and of 60, 60 and 160 s
        assert etas == ["2:28:20", "1:28:00", "1:27:00", "1:26:00"]

    @pytest.mark.parametrize("test_freq", [-1, 3, 5, 20])
    def test_the_eta_is_right_from_the_second_step_on(self, test_freq: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """A slow start, a slow first validation and a slow first step do not affect the estimate of later steps."""
        now, total = [0.0], 20
        monkeypatch.setattr("phalanx.zoo.loggers.console.time", SimpleNamespace(monotonic=lambda: now[0]))
        config = TrainerConfig(test_freq=test_freq)
        eta = Eta(RunStart(config, {}, 0, total, None, Timers()))
        now[0] += 90 + 12
        eta.update(0, {"val/a/reward/mean": 0.0, "time/validation": 12.0})
        assert str(eta) == "-"
        etas, ends = [], []
        for step in range(1, total + 1):
            validation = 10.0 if test_freq > 0 and (step % test_freq == 0 or step == total) else 0.0
            now[0] += (80 if step == 1 else 4 + step % 2) + validation
            eta.update(step, {"reward/mean": 0.0} | ({"time/validation": validation} if validation else {}))
            etas.append(eta.seconds())
            ends.append(now[0])
        for predicted, end in list(zip(etas, ends, strict=True))[1:-1]:
            assert predicted is not None and 1 / 1.3 <= predicted / (now[0] - end) <= 1.3
        assert etas[-1] == 0

    def test_the_eta_runs_down_within_a_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0.0]
        monkeypatch.setattr("phalanx.zoo.loggers.console.time", SimpleNamespace(monotonic=lambda: now[0]))
        eta = Eta(RunStart(TrainerConfig(test_freq=-1), {}, 0, 4, None, Timers()))
        now[0] = 10.0
        eta.update(1, {})
        assert str(eta) == "0:00:30"
        now[0] = 14.0
        assert str(eta) == "0:00:26"
        now[0] = 100.0
        assert str(eta) == "0:00:00"

    def test_a_row_shows_losses_and_what_can_differ(self) -> None:
        supervised = {"actor/grad_norm": 2.0, "train/loss": 5.5, "train/entropy": 1.0, "perf/peak_memory_gb": 3.0}
        assert shown_keys(supervised) == ["train/loss", "actor/grad_norm", "perf/peak_memory_gb"]
        row = {"actor/ratio_mean": 1.0, "actor/clipfrac": 0.0, "actor/entropy": 0.5, "response/length_mean": 20.0}
        row |= {"response/truncated_ratio": 0.25}
        text = ["response/length_mean", "response/truncated_ratio", "actor/entropy"]
        assert shown_keys(row) == text  # one update per rollout
        assert shown_keys(row | {"actor/ratio_mean": 1.01}) == [*text, "actor/ratio_mean", "actor/clipfrac"]
        assert shown_keys({"actor/dpo_loss": 0.5, "actor/accuracy": 0.75}) == ["actor/dpo_loss", "actor/accuracy"]

    def test_a_terminal_shows_what_the_job_is_at_below_the_rows(self, tmp_path: Path) -> None:
        """Rows and warnings are printed once and unbroken; a line below shows phase, micro-batch and time."""
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
            eta = "-" if done == 0 else r"0:\d\d:\d\d"
            assert re.search(rf"step {done}/2 done \S+ {phase} 0:\d\d:\d\d ETA {eta}", plain), phase
        assert screen.endswith("\x1b[?25h")  # the cursor is shown

    @pytest.mark.quick("terminals0")
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
from phalanx.run.cli import _Terminal
from rich.live import Live
from phalanx.run.telemetry.run_logger import RunLogger
from phalanx.telemetry.timers import Timers
from phalanx.config.run import TrainerConfig

logging.basicConfig(format="%(message)s", handlers=[_Terminal()])
timers = Timers()
plain, views = Live.refresh, [0]

def refresh(live):
    plain(live)
    views[0] += 1

Live.refresh = refresh

def look():
    seen = views[0]
    while sys.stderr.isatty() and views[0] < seen + 2:  # the second one began after this
        time.sleep(0.01)

def work(name, done, expected=0):
    with timers(name):
        timers.expect(expected)
        for _ in range(done):
            timers.advance()
            look()
        if not done:
            look()

numbers = {"actor/ratio_mean": 1.25, "actor/clipfrac": 0.5, "actor/grad_norm": 0.5, "perf/step_s": 12.5}
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
NUMBERS = "actor/ratio_mean 1.25  actor/clipfrac 0.5  actor/grad_norm 0.5  perf/step_s 12.5"  # wider than the terminal
ROWS = [
    "step 0/2  validation  ocr/reward/mean 0.5000",
    f"step 1/2  reward/mean 0.25  {NUMBERS}",
    f"step 2/2  reward/mean 0.5  {NUMBERS}",
]


def shown(code: str, folder: Path, *terminals: str) -> tuple[str, str, str]:
    """Run a script with these streams on a terminal; returns the terminal's output, and the other stdout and stderr."""
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
    """The output of a pseudo-terminal until its other side is closed."""
    while select.select([descriptor], [], [], 240)[0]:
        try:
            data = os.read(descriptor, 4096)
        except OSError:  # Linux: the other side is closed
            return
        if not data:
            return
        yield data
