"""The names of the files in a run's folder (trainer.output_dir), and readers for metrics.jsonl, config.yaml and the
ranks' state files. Any of them may be damaged, or written by somebody else: see phalanx.config.inside.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from phalanx.config.files import MOST_CONFIG, json_object
from phalanx.config.inside import list_inside, open_inside, read_inside, status_inside, write_inside
from phalanx.config.messages import MOST_SHOWN, cut
from phalanx.config.sources import parse_yaml
from phalanx.run.telemetry.curves import Curves, MetricsFile, Points, is_count, is_finite
from phalanx.telemetry.loggers import ELAPSED, setting

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.yaml"
RUNNING_FILE = "running.json"  # of the job that owns the folder, see phalanx.run.folder_lock
BEAT_S = 2.0  # interval at which the job updates it
STOP_FILE = "stop.json"  # a request to stop, with the token of the start to which it applies
RANKS = "ranks"  # see phalanx.run.telemetry.rank_files
LATEST = 1e11  # seconds, in the year 5138: later times cannot be shown as dates and come from damaged files
PROFILES = "profiles"  # see phalanx.run.telemetry.profiles
VALIDATION = re.compile(r"val/(.+)/reward/mean")
LONGEST_EVENT = 500  # characters
READERS = 16  # threads
MOST_JSON = 1 << 16  # bytes of a file with one small object
S = TypeVar("S")
T = TypeVar("T")
NUMBERS = ("interval", "memory_gb", "phase_since", "since")  # of a rank's state, besides its counts
COUNTS, TEXTS = ("rank", "ranks", "pid", "step", "total"), ("role", "host", "phase", "rate", "ended")


@dataclass(frozen=True)
class Run:
    """The contents of a run's files. `label` tells it from other runs on the same page; empty for a single run.
    `advice` are the job's warnings about its metrics, `problems` what could not be read.
    """

    folder: Path
    label: str
    curves: Curves
    config_text: str | None
    config: dict[str, Any]
    advice: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def points(self, key: str) -> Points:
        """(step, value) of all rows that have a finite value of `key`."""
        return self.curves.points.get(key, Points())

    def values(self, key: str) -> list[float]:
        """The finite values of `key`, in the order of the steps."""
        return list(self.points(key).values)

    def setting(self, name: str) -> str | None:
        """The value of a configuration key such as `model.path`, as a short text; None if it is not set."""
        value = setting(self.config, name)
        return None if value is None else cut(str(value))

    def metrics(self) -> list[str]:
        """The keys of all rows except the step, in the order of first use."""
        return list(self.curves.points)

    def validations(self) -> dict[str, Points]:
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
        return self.curves.last_step


class RunReader:
    """Reads a run; each `read` takes only what is new in its metrics.jsonl."""

    def __init__(self, folder: Path, label: str = "") -> None:
        self._folder, self._label = folder, label
        self._key: str | None = None  # of the config.yaml that was read
        self._text: str | None = None
        self._config: dict[str, Any] = {}
        self._metrics: MetricsFile | None = None

    def read(self) -> Run:
        """The run as it is now. Raises ValueError if it is not a run's folder; config.yaml may be missing."""
        folder, problems = self._folder, list[str]()
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder; give the trainer.output_dir of a run")
        key = key_of(folder, CONFIG_FILE)
        if self._metrics is None or key != self._key:
            self._key, (self._text, self._config) = key, read_config(folder)
            total, samples = self._integer_setting("trainer.total_training_steps"), self._integer_setting("rollout.n")
            limit = self._integer_setting("data.max_response_length")
            samples = 0 if setting(self._config, "rollout.engine") == "dataset" else samples or 1
            self._metrics = MetricsFile(folder, METRICS_FILE, total, samples, limit)
        try:
            self._metrics.read()
        except FileNotFoundError:
            raise ValueError(f"{folder}: no {METRICS_FILE} in it; give the trainer.output_dir of a run") from None
        except OSError as error:
            problems.append(f"{METRICS_FILE} cannot be read: {error.strerror}.")
        curves, advice = self._metrics.curves, tuple(self._metrics.advice)
        return Run(folder, self._label, curves, self._text, self._config, advice, tuple(problems))

    def _integer_setting(self, name: str) -> int | None:
        value = setting(self._config, name)
        return value if is_count(value) else None


def read_run(folder: Path, label: str = "") -> Run:
    """The run that wrote to `folder`. Raises ValueError if it is not a run's folder; config.yaml may be missing."""
    return RunReader(folder, label).read()


def key_of(folder: Path, *names: str) -> str:
    """A key that changes whenever one of the files is written."""
    parts = []
    for name in names:
        status = status_inside(folder, name)
        if status is not None:
            parts.append(f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}")
    return ":".join(parts)


def read_config(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """The text of a run's config.yaml, None if it is missing or cannot be read, and its values."""
    try:
        text = read_inside(folder, CONFIG_FILE, MOST_CONFIG).decode("utf-8", "replace")
    except OSError:  # it may be replaced at this moment, or be unreadable for this user
        return None, {}
    try:
        config = parse_yaml(text)
    except yaml.YAMLError:
        config = {}  # the text is shown nevertheless
    return text, config if isinstance(config, dict) else {}


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file that another process may replace; None if the file does not contain one."""
    try:
        return json_object(read_inside(folder, name, MOST_JSON))
    except OSError:
        return None


def tail(folder: Path, name: str, size: int) -> bytes:
    """Read only the last `size` bytes of a file. Raises OSError."""
    with open_inside(folder, name) as file:
        file.seek(max(file.seek(0, os.SEEK_END) - size, 0))
        return file.read(size)


def write_json(folder: Path, name: str, value: dict[str, Any]) -> None:
    """Write a file atomically, so that readers never see a part of it. Raises OSError."""
    write_inside(folder, name, json.dumps(value, indent=1) + "\n")


def at_once(read: Callable[[S], T], values: Collection[S]) -> list[T]:
    """`read` of each value, in order. Many are read in threads, since a file on another machine takes milliseconds."""
    if len(values) < READERS:
        return list(map(read, values))
    with suppress(RuntimeError), ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, values))
    return list(map(read, values))  # a login node may limit the memory, and no thread can start


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """The states of all ranks of the last start, ordered by rank."""

    def read(name: str) -> dict[str, Any] | None:
        return _checked_state(read_json(folder, f"{RANKS}/{name}"))

    numbers = dict[str, int]()
    for name, is_folder in list_inside(folder, RANKS):
        number = re.fullmatch(r"(0|[1-9][0-9]{0,6})\.json", name)
        if number and not is_folder:
            numbers[name] = int(number[1])
    states = []
    for rank, state in zip(numbers.values(), at_once(read, numbers), strict=True):
        if state is not None and state["rank"] == rank:
            states.append(state)
    states.sort(key=lambda state: state["rank"])
    if not states:
        return []
    # Every start has a rank 0, whose file gives the number of ranks. Without it use the newest file, which may be
    # wrong if a clock was set back.
    count = states[0]["ranks"] if states[0]["rank"] == 0 else max(states, key=lambda state: state["at"])["ranks"]
    return [state for state in states if state["rank"] < count]


def _checked_state(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """The fields of a rank's state that are shown; None if one that readers rely on is missing or of another type."""
    if value is None or not (is_finite(value.get("at")) and 0 < value["at"] < LATEST):
        return None
    if not all(is_finite(value.get(name, 0)) for name in NUMBERS):
        return None
    state = {name: value[name] for name in ("at", *NUMBERS) if name in value}
    state |= {name: value[name] for name in COUNTS if is_count(value.get(name))}
    state |= {name: value[name][:MOST_SHOWN] for name in TEXTS if isinstance(value.get(name), str)}
    return state if state.keys() >= {"rank", "ranks", "pid", "host"} else None
