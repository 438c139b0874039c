"""Logging: metrics.jsonl, and the loggers of `trainer.logger`.

Row `step: k` is written after k training steps; the validation before training is a row `step: 0` with `val/...`
metrics only. Steps strictly increase within a run.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.config.files import replace_file
from phalanx.config.inside import append_inside
from phalanx.config.joint import POLICIES, WRITER
from phalanx.config.messages import reason, users_code
from phalanx.config.run import TrainerConfig
from phalanx.exit import Stopped
from phalanx.run.telemetry.advice import Advisor
from phalanx.run.telemetry.curves import read_metrics
from phalanx.run.telemetry.run_folder import METRICS_FILE
from phalanx.telemetry.loggers import ELAPSED, KEY, Logger, RunStart, check_loggers, setting
from phalanx.telemetry.records import Record, kind_of, save_records
from phalanx.telemetry.timers import Timers

_log = logging.getLogger(__name__)


class RunLogger:
    """Writes a run's metrics and samples to files in `trainer.output_dir` and to the loggers of `trainer.logger`.

    `start_step` is the number of completed training steps: 0 for a new run, k for one resumed from a checkpoint of step
    k. Rows of later steps, which a killed run wrote after that checkpoint, are removed at the start; with 0, all rows
    of an older run are, unless this one `resumes` before it wrote the row of step 1. `ids` maps entries of
    `trainer.logger` to the run ids that the checkpoint contains for them;
    empty for a new run. With enabled=False (on every rank but 0) nothing is written and all methods return at once.
    `timers` show the job's current phase.

    Raises ConfigError for unknown loggers and for loggers that fail to start.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        resolved_config: dict[str, Any],
        ids: Mapping[str, str],
        start_step: int,
        total_steps: int,
        enabled: bool,
        timers: Timers | None = None,
        resumes: bool = False,
    ) -> None:
        kinds = check_loggers(trainer.logger)
        self.ids = dict(ids)  # to be saved in checkpoints
        self._file: _MetricsFile | None = None
        self._loggers: dict[str, Logger] = {}
        if not enabled:
            return
        self._folder = Path(trainer.output_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / METRICS_FILE
        earlier = read_metrics(path) if (start_step or resumes) and path.is_file() else []
        self._repeated = max((row["step"] for row in earlier), default=-1)  # a resumed run repeats steps up to this one
        limit, self._advisors = setting(resolved_config, "data.max_response_length"), []
        for policy in POLICIES if WRITER in resolved_config else (None,):
            section = "rollout" if policy is None else f"{policy}.rollout"
            samples = setting(resolved_config, f"{section}.n") or 1
            given = setting(resolved_config, f"{section}.engine") == "dataset"
            self._advisors.append(Advisor(total_steps, 0 if given else samples, limit, policy))
        self._continued: set[str] = set()  # entries whose loggers continue their earlier run

        start = RunStart(trainer, resolved_config, start_step, total_steps, None, timers or Timers())
        try:
            # trackers come first: if one fails to start, an older run's rows and the terminal are still untouched
            self._open_loggers(start, kinds, terminal=False)
            self._file = _MetricsFile(path, [row for row in earlier if row["step"] <= start_step])
            self._open_loggers(start, kinds, terminal=True)
        except Exception:  # close the loggers that have started
            self.close(failed=True)
            raise

    def _open_loggers(self, start: RunStart, kinds: dict[str, type[Logger]], terminal: bool) -> None:
        """Open the loggers that use the terminal, or the others, each with its earlier id. Raises ConfigError."""
        for entry, kind in kinds.items():
            if kind.terminal != terminal:
                continue
            with users_code(f"{KEY}: {entry} could not start:"):
                logger = kind(replace(start, id=self.ids.get(entry)))
            self._loggers[entry] = logger
            if logger.id is not None:
                if logger.id == self.ids.get(entry):
                    self._continued.add(entry)
                self.ids[entry] = str(logger.id)

    def log(self, step: int, row: dict[str, float]) -> None:
        """Write one row. `step` must be greater than that of the previous row; values may be NaN or infinite.

        Adds `perf/elapsed_s`, the seconds since the run began (including earlier starts of a resumed run), and logs a
        warning for each sign that the run does not learn, once per kind: see phalanx.run.telemetry.advice.
        """
        if self._file is None:
            return
        row = self._file.write(step, row)
        self._call_loggers(lambda logger: logger.log(step, row), step)
        for advisor in self._advisors:
            for warning in advisor.warnings(step, row):
                _log.warning("%s", warning)

    def records(self, step: int, set_name: str, records: Iterable[Record]) -> None:
        """Write a validation's samples to `<output_dir>/images/<set>/step_<k>`, or texts to `samples/<set>/step_<k>`,
        and pass them to the loggers.
        """
        if self._file is None:
            return
        rows = sorted(records, key=lambda record: record.index)
        try:
            folder = save_records(self._folder, step, set_name, rows)
        except OSError as error:  # a full disk must not end the run
            _log.warning("%s of step %d were not written: %s", kind_of(rows), step, error)
            return
        if rows:
            self._call_loggers(lambda logger: logger.records(step, set_name, rows, folder), step)

    def close(self, failed: bool = False) -> None:
        """Flush and close all loggers; safe to call twice. `failed` marks the run as crashed in them."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._call_loggers(lambda logger: logger.close(failed))
        self._loggers = {}

    def _call_loggers(self, act: Callable[[Logger], None], step: int | None = None) -> None:
        """Call `act` for each logger, the one on the terminal first. A logger that fails is dropped, so that the run
        goes on. Append-only loggers are skipped if they contain this `step` from an earlier start.
        """
        for entry, logger in reversed(self._loggers.copy().items()):
            if step is not None and step <= self._repeated and logger.append_only and entry in self._continued:
                continue
            try:
                act(logger)
            except Exception as error:  # libraries and user code may raise anything
                del self._loggers[entry]
                text = error if isinstance(error, OSError) else reason(error)
                _log.warning("the logger %s is switched off: %s", entry, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a stopped run saves its checkpoint first, while there is time, and then closes its loggers
        if kind is not Stopped:
            self.close(failed=kind is not None)


class _MetricsFile:
    """metrics.jsonl: one row of strict JSON per step, written at once. While the disk is full, rows wait in memory."""

    def __init__(self, path: Path, kept: list[dict[str, Any]]) -> None:
        """Begin with the rows `kept` from an earlier start; rows after its checkpoint will be logged again."""
        self._path = path
        self._replace_content("".join(map(_json_line, kept)).encode())
        self._last = kept[-1]["step"] if kept else -1
        before = kept[-1].get(ELAPSED) if kept else None
        self._origin = time.monotonic() - (before or 0.0)
        self._waiting = b""

    def _replace_content(self, content: bytes) -> None:
        """Replace the file by one with this content, and open it to append."""
        replace_file(self._path, content)
        self._stream = append_inside(self._path.parent, self._path.name, buffering=0)

    def write(self, step: int, row: dict[str, float]) -> dict[str, float]:
        """Append a row and return it, with the elapsed time added."""
        assert step > self._last, f"metrics: row of step {step} after one of step {self._last}"
        self._last = step
        row = {**row, ELAPSED: round(time.monotonic() - self._origin, 3)}
        self._waiting += _json_line({"step": step} | {key: _json_number(value) for key, value in row.items()}).encode()
        self._flush_rows()
        return row

    def _flush_rows(self) -> None:
        """Write either all waiting rows or none."""
        size = self._stream.tell()
        try:
            if not self._path.exists():  # the file was deleted; the open stream still has its rows
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._stream.seek(0)
                deleted = self._stream
                self._replace_content(deleted.read())
                deleted.close()
            written = self._stream.write(self._waiting)
        except OSError as error:
            written, reason = 0, str(error)
        else:
            reason = "no space left"
        if written == len(self._waiting):
            self._waiting = b""
            return
        self._stream.truncate(size)  # readers must not see half a row
        self._stream.seek(size)
        _log.warning("%s: %s; %d rows wait to be written", self._path, reason, self._waiting.count(b"\n"))

    def close(self) -> None:
        if self._waiting:
            self._flush_rows()
        self._stream.close()


def _json_number(value: float) -> float | None:
    """A Python number for strict JSON; None for NaN and infinities."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _json_line(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
