"""The metrics of a run in memory: a column of steps and one of values for each metric, read on from where they were."""

import logging
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from phalanx.config.files import json_object
from phalanx.config.messages import MOST_SHOWN
from phalanx.run.telemetry.advice import PATIENCE, Advisor
from phalanx.run.telemetry.growing_file import GrowingFile
from phalanx.telemetry.timers import is_training_row

Point = tuple[int, float]
MOST_COUNT = 1 << 53  # a larger integer is not exact in a browser
MOST_NAMES = 5000  # metrics
MOST_VALUES = 12_000_000  # of 16 bytes each: 100,000 steps with 120 metrics
MOST_BYTES = 1 << 28  # of a metrics.jsonl
MOST_WARNINGS = 10  # of damaged lines that are read at once
LARGEST = sys.float_info.max
log = logging.getLogger(__name__)


class Points:
    """The points (step, value) of a curve, in two columns."""

    def __init__(self, steps: Sequence[int] = (), values: Sequence[float] = ()) -> None:
        self.steps, self.values = array("q", steps), array("d", values)

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Copies of the steps [N] and the values [N]."""
        return np.array(self.steps, dtype=np.int64), np.array(self.values, dtype=np.float64)

    def aligned(self, steps: Sequence[int]) -> "Points":
        """The points at these steps, with the value 0 where there is none."""
        values = dict(self)
        return Points(steps, [values.get(step, 0.0) for step in steps])

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, place: int) -> Point:
        return self.steps[place], self.values[place]

    def __iter__(self) -> Iterator[Point]:
        return zip(self.steps, self.values, strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Iterable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # it grows


class Curves:
    """The points of each metric, and facts about the rows; of more than MOST_VALUES values only the newest."""

    def __init__(self) -> None:
        self.points: dict[str, Points] = {}
        self.rows = self.last_step = 0
        self.is_trained = False  # whether a row is that of a training step
        self.left_out = 0  # metrics and rows that are not kept
        self._values = 0

    def add(self, row: dict[str, Any]) -> None:
        """Add a row with its step."""
        step = row["step"]
        self.rows, self.last_step = self.rows + 1, step
        self.is_trained = self.is_trained or is_training_row(row)
        for key, value in row.items():
            if key == "step":
                continue
            name = key[:MOST_SHOWN]
            if name not in self.points:
                if len(self.points) == MOST_NAMES:
                    self.left_out += 1
                    continue
                self.points[name] = Points()
            points = self.points[name]
            if is_finite(value):
                points.steps.append(step)
                points.values.append(value)
                self._values += 1
        if self._values > MOST_VALUES:
            self._drop_half()

    def _drop_half(self) -> None:
        """Drop the older half of all points."""
        self._values = 0
        for points in self.points.values():
            half = len(points) // 2
            del points.steps[:half], points.values[:half]
            self.left_out += half
            self._values += len(points)


class MetricsFile:
    """A run's metrics.jsonl: `read` adds its new rows to `curves`, and their warnings to `advice`.

    `steps`, `samples` and `limit` are the arguments of Advisor; None for a number of steps that is not known.
    """

    def __init__(self, folder: Path, name: str, steps: int | None, samples: int, limit: int | None) -> None:
        self._path, self._steps, self._settings = folder / name, steps, (samples, limit)
        self._file = GrowingFile(folder, name, MOST_BYTES, self._start_over)
        self._start_over()

    def _start_over(self) -> None:
        self.curves, self.advice = Curves(), list[str]()
        self._first, self._warnings = list[dict[str, Any]](), list[str]()
        self._advisor = Advisor(self._steps or PATIENCE, *self._settings)

    def read(self) -> None:
        """Add the new rows. Raises OSError."""
        for row in _metric_rows(self._path, self._file):
            self.curves.add(row)
            numbers = {name: value if is_finite(value) else None for name, value in row.items()}
            self._warnings += self._advisor.warnings(row["step"], numbers)
            if self._steps is None and len(self._first) <= PATIENCE:
                self._first.append(numbers)
        self.advice = self._warnings
        if self._steps is None and self.curves.last_step < PATIENCE:  # the run may be as short as it is now
            advisor, self.advice = Advisor(self.curves.last_step, *self._settings), []
            for numbers in self._first:
                self.advice += advisor.warnings(int(numbers["step"] or 0), numbers)
        self.curves.left_out += self._file.cut


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl. A half-written last line is ignored, other broken lines with a warning. Raises
    OSError.
    """
    return list(_metric_rows(path, GrowingFile(path.parent, path.name, sys.maxsize, list)))


def _metric_rows(path: Path, file: GrowingFile) -> Iterator[dict[str, Any]]:
    damaged = 0
    for number, line in file.lines():
        row = json_object(line)
        if row is not None and is_count(row.get("step")):
            yield row
            continue
        damaged += 1
        if damaged <= MOST_WARNINGS:
            log.warning("%s:%d: not a JSON object with a step; the line is ignored", path, number)
    if damaged > MOST_WARNINGS:
        log.warning("%s: %d more lines like these", path, damaged - MOST_WARNINGS)


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a number other than NaN and infinity."""
    return isinstance(value, int | float) and abs(value) <= LARGEST  # an int may be too large for a float


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer that a browser represents exactly."""
    return isinstance(value, int) and abs(value) <= MOST_COUNT
