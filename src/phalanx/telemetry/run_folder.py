"""The names of the files in a run's folder (trainer.output_dir), and readers for metrics.jsonl, config.yaml and the
ranks' state files.
"""

import json
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from phalanx.config.files import json_object, replace_file
from phalanx.telemetry.loggers import ELAPSED, setting

Point = tuple[int, float]
METRICS_FILE = "metrics.jsonl"
RUNNING_FILE = "running.json"  # of the job that owns the folder, see phalanx.training.folder_lock
BEAT_S = 2.0  # interval at which the job updates it
STOP_FILE = "stop.json"  # a request to stop, with the token of the start to which it applies
RANKS = "ranks"  # see phalanx.telemetry.rank_files
LATEST = 1e11  # seconds, in the year 5138: later times cannot be shown as dates and come from damaged files
PROFILES = "profiles"  # see phalanx.telemetry.profiles
VALIDATION = re.compile(r"val/(.+)/reward/mean")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The contents of a run's files. `label` tells it from other runs on the same page; empty for a single run."""

    folder: Path
    label: str
    rows: list[dict[str, Any]]
    config_text: str | None
    config: dict[str, Any]

    def points(self, key: str) -> list[Point]:
        """(step, value) of all rows that have a finite value of `key`."""
        return [(row["step"], row[key]) for row in self.rows if is_finite(row.get(key))]

    def values(self, key: str) -> list[float]:
        """The finite values of `key`, in the order of the steps."""
        return [value for _, value in self.points(key)]

    def setting(self, name: str) -> str | None:
        """The value of a configuration key such as `model.path`, as text; None if it is not set."""
        value = setting(self.config, name)
        return None if value is None else str(value)

    def metrics(self) -> list[str]:
        """The keys of all rows except the step, in the order of first use."""
        keys: dict[str, None] = {}
        for row in self.rows:
            keys |= dict.fromkeys(row)
        keys.pop("step", None)
        return list(keys)

    def validations(self) -> dict[str, list[Point]]:
        """The mean reward of each validation set over the steps."""
        validations = {}
        for key in sorted(self.metrics()):
            match, points = VALIDATION.fullmatch(key), self.points(key)
            if match and points:
                validations[match[1]] = points
        return validations

    def wall_seconds(self) -> float | None:
        """The duration of the run, including earlier starts; None if no row contains it."""
        elapsed, seconds = self.values(ELAPSED), self.values("perf/step_s")
        total = elapsed[-1] if elapsed else sum(seconds) if seconds else None
        return total if total is not None and 0 <= total < LATEST else None  # a damaged file may contain any number

    def titled(self, title: str) -> str:
        """The title, followed by the run's label if there are several runs."""
        return f"{title} · {self.label}" if self.label else title

    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0


def read_run(folder: Path, label: str = "") -> Run:
    """The run that wrote to `folder`. Raises ValueError if it is not a run's folder; config.yaml may be missing."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the trainer.output_dir of a run")
    if not (folder / METRICS_FILE).is_file():
        raise ValueError(f"{folder}: no {METRICS_FILE} in it; give the trainer.output_dir of a run")
    return Run(folder, label, read_metrics(folder / METRICS_FILE), *read_config(folder))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows of a metrics.jsonl. A half-written last line is ignored, other broken lines with a warning."""
    rows = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = json_object(line)
        if row is not None and isinstance(row.get("step"), int):
            rows.append(row)
        elif number < len(lines):
            log.warning("%s:%d: not a JSON object with a step; the line is ignored", path, number)
    return rows


def read_config(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """The text of a run's config.yaml, None if it is missing, and its values."""
    path = folder / "config.yaml"
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    except OSError:  # it may be replaced at this moment, or be unreadable for this user
        text = None
    try:
        config = yaml.safe_load(text) if text is not None else {}
    except (yaml.YAMLError, RecursionError):
        config = {}  # the text is shown nevertheless
    return text, config if isinstance(config, dict) else {}


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file that another process may replace; None if the file does not contain one."""
    try:
        return json_object(path.read_bytes())
    except OSError:
        return None


def tail(path: Path, size: int) -> bytes:
    """Read only the last `size` bytes of a file. Raises OSError."""
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - size, 0))
        return file.read(size)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file atomically, so that readers never see a part of it. Raises OSError."""
    replace_file(path, json.dumps(value, indent=1) + "\n")


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """The states of all ranks of the last start, ordered by rank."""
    states = []
    for path in (folder / RANKS).glob("*.json"):
        state = read_json(path) if path.stem.isdecimal() and is_inside(folder, path) else None
        if state is not None and state.get("rank") == int(path.stem) and _is_state(state):
            states.append(state)
    states.sort(key=lambda state: state["rank"])
    if not states:
        return []
    # Every start has a rank 0, whose file gives the number of ranks. Without it use the newest file, which may be
    # wrong if a clock was set back.
    count = states[0]["ranks"] if states[0]["rank"] == 0 else max(states, key=lambda state: state["at"])["ranks"]
    return [state for state in states if state["rank"] < count]


def _is_state(state: dict[str, Any]) -> bool:
    """Whether a rank's state has the fields that readers rely on; the file may be damaged or written by others."""
    numbers = isinstance(state.get("ranks"), int) and isinstance(state.get("pid"), int)
    shown = all(is_finite(state.get(name, 0)) for name in ("interval", "memory_gb", "phase_since"))
    is_dated = is_finite(state.get("at")) and 0 < state["at"] < LATEST
    return numbers and shown and is_dated and isinstance(state.get("host"), str)


def inside(folder: Path, path: Path) -> Path:
    """Return `path`, or raise FileNotFoundError if a link or `..` leads out of the run's folder."""
    if not is_inside(folder, path):
        raise FileNotFoundError(f"{path}: it is outside of {folder}")
    return path


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a path lies in the folder once links and `..` are resolved."""
    return path.resolve().is_relative_to(folder.resolve())


def is_finite(value: Any) -> bool:
    """Whether a value is a number other than NaN and infinity."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max  # an int may be too large for a float
