"""Logging: phase timers, metrics.jsonl, and the loggers of `trainer.logger`, which are opened and fed here.

The step convention: row `step: k` is written once k training steps are done; the validation before training is a row
`step: 0` that holds `val/...` only. Steps only grow within one run.
"""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from phalanx.config.files import replace_file
from phalanx.config.joint import POLICIES, WRITER
from phalanx.config.load import ConfigError
from phalanx.config.messages import reason
from phalanx.config.run import TrainerConfig
from phalanx.exit import Stopped
from phalanx.telemetry.advice import Advisor
from phalanx.telemetry.loggers import ELAPSED, KEY, Logger, RunStart, check_loggers, setting
from phalanx.telemetry.records import Record, kind_of, save_records
from phalanx.telemetry.run_folder import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from phalanx.distributed.mesh import World

MAX_SPANS = 4096  # phases that wait to be written
_log = logging.getLogger(__name__)


@dataclass
class Phase:
    """The work in progress: `done` of `expected` micro-batches; `expected` is 0 where their number is not known. It
    began at `since`, by time.perf_counter.
    """

    name: str
    done: int = 0
    expected: int = 0
    since: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        if not self.done and not self.expected:
            return self.name
        return f"{self.name} {self.done}/{self.expected}" if self.expected else f"{self.name} {self.done}"


class Timers:
    """Seconds per phase: `with timers("rollout"): ...`, then `timers.pop()` once per step. `phase` is the one in
    progress; it may say how many micro-batches it expects, and count them.

    With `sync` both ends wait for the device, which attributes CUDA work exactly but stalls the queue. Without it, a
    phase that ends with a value read by the host is exact; any other one leaves work to the next phase.

    `spans` are the last phases that ended, each with its training step, from 1, its begin and its end, for the thread
    of phalanx.telemetry.rank_files; `step` is that of now, 0 before the first one, and `rate` that of this rank in its
    last step, in words.

    Each phase is also a `range(name)` and each step a `profiler(step)`, which do nothing unless the step is profiled.
    """

    def __init__(self, sync: bool = False, *, part: str = "", whole: "Timers | None" = None) -> None:
        """Of a `part` of a `whole`, such as one of two policies, the phases are the whole's, named after the part."""
        self._sync, self._before = sync, f"{part}_" if part else ""
        self._whole = self if whole is None else whole
        self._seconds: dict[str, float] = {} if whole is None else whole._seconds
        self._phase = Phase("")
        self.step, self.rate = 0, ""
        self.spans: deque[tuple[str, int, float, float]] = deque(maxlen=MAX_SPANS)
        self.range: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.profiler: Callable[[int], AbstractContextManager[object]] = nullcontext

    def profile(self, trainer: TrainerConfig, world: "World") -> None:
        """Have the steps of trainer.profile_steps profiled on this rank, where there are some."""
        if trainer.profile_steps:
            from phalanx.telemetry.profiles import Profiler

            self.profiler = Profiler(trainer, world, self)

    @contextmanager
    def training_step(self, number: int) -> Iterator[None]:
        """The `with` block is a training step, from 1."""
        self.step = number
        with self.profiler(number):
            yield

    @property
    def phase(self) -> Phase:
        """The phase in progress."""
        return self._whole._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._whole._phase = phase

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to phase `name`, even if the block raises."""
        self._wait()
        outer, self.phase = self.phase, Phase(f"{self._before}{name}")
        start = time.perf_counter()
        try:
            with self._whole.range(self.phase.name):
                yield
                self._wait()
        finally:
            end = time.perf_counter()
            self.add(name, end - start)
            self._whole.spans.append((self.phase.name, self._whole.step, start, end))
            self.phase = outer

    def expect(self, micro_batches: int) -> None:
        """Set the number of micro-batches of the phase."""
        self.phase = replace(self.phase, done=0, expected=micro_batches)

    def advance(self) -> None:
        """A micro-batch of the phase is done."""
        self.phase.done += 1

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere, as by a worker thread; call it from the main thread."""
        name = f"{self._before}{name}"
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def note_rate(self, per_second: float, noun: str) -> None:
        """Keep what this rank has done per second of the step."""
        self._whole.rate = f"{per_second:.4g} {noun}/s"

    def seconds(self, name: str) -> float:
        """Seconds of a phase since the last `pop`."""
        return self._seconds.get(f"{self._before}{name}", 0.0)

    def pop(self) -> dict[str, float]:
        """`{"time/<phase>": seconds}` since the last call, in the order of first use; starts anew."""
        row = {f"time/{name}": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return row

    def _wait(self) -> None:
        if self._sync:
            import torch

            if torch.cuda.is_available():
                torch.cuda.synchronize()


class RunLogger:
    """Writer of a run's numbers and samples: files in `trainer.output_dir`, and the loggers of `trainer.logger`.

    `start_step` is the number of training steps that are done: 0 for a new run, k for one resumed from a checkpoint of
    step k. Rows of later steps, which a killed run wrote after that checkpoint, are dropped at the start, and all rows
    of an older run where it is 0. `ids` are the loggers' own, by their entries in `trainer.logger`, as kept in that
    checkpoint; empty for a new run. With `enabled` False (every rank but 0) nothing is written and every method returns
    at once. `timers` say what the job is at.

    Raises ConfigError for an unknown logger, and for one that cannot start.
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
    ) -> None:
        kinds = check_loggers(trainer.logger)
        self.ids = dict(ids)  # to keep in checkpoints
        self._file: _MetricsFile | None = None
        self._loggers: dict[str, Logger] = {}
        if not enabled:
            return
        self._folder = Path(trainer.output_dir)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / METRICS_FILE
        earlier = read_metrics(path) if start_step and path.is_file() else []
        self._repeated = max((row["step"] for row in earlier), default=-1)  # a resumed run goes through it again
        limit, self._advisors = setting(resolved_config, "data.max_response_length"), []
        for policy in POLICIES if WRITER in resolved_config else (None,):
            samples = setting(resolved_config, "rollout.n" if policy is None else f"{policy}.rollout.n")
            self._advisors.append(Advisor(total_steps, samples or 1, limit, policy))
        self._continued: set[str] = set()  # entries whose loggers go on with the run that they had

        start = RunStart(trainer, resolved_config, start_step, total_steps, None, timers or Timers())
        try:
            # a tracker may fail to start: it comes first, so that an older run's rows and the terminal stay as they are
            self._open(start, kinds, terminal=False)
            self._file = _MetricsFile(path, [row for row in earlier if row["step"] <= start_step])
            self._open(start, kinds, terminal=True)
        except Exception:  # the run does not begin: those that have started end
            self.close(failed=True)
            raise

    def _open(self, start: RunStart, kinds: dict[str, type[Logger]], terminal: bool) -> None:
        """Open the loggers that take the terminal, or the others, each with its earlier id. Raises ConfigError."""
        for entry, kind in kinds.items():
            if kind.terminal != terminal:
                continue
            try:
                logger = kind(replace(start, id=self.ids.get(entry)))
            except ConfigError:
                raise
            except Exception as error:  # whatever its library, or the user's code, raises
                raise ConfigError(f"{KEY}: {entry} could not start: {reason(error)}") from error
            self._loggers[entry] = logger
            if logger.id is not None:
                if logger.id == self.ids.get(entry):
                    self._continued.add(entry)
                self.ids[entry] = str(logger.id)

    def log(self, step: int, row: dict[str, float]) -> None:
        """Write one row. `step` must be greater than in the row before; values may be any finite or non-finite number.

        `perf/elapsed_s`, the seconds since the run began (earlier starts of a resumed run included), is added. Signs
        that the run learns nothing are warned of, each once: see phalanx.telemetry.advice.
        """
        if self._file is None:
            return
        row = self._file.write(step, row)
        self._each(lambda logger: logger.log(step, row), step)
        for advisor in self._advisors:
            for warning in advisor.warnings(step, row):
                _log.warning("%s", warning)

    def records(self, step: int, set_name: str, records: Iterable[Record]) -> None:
        """Write a validation's samples to `<output_dir>/images/<set>/step_<k>`, or texts to `samples/<set>/step_<k>`,
        and hand them to the loggers.
        """
        if self._file is None:
            return
        rows = sorted(records, key=lambda record: record.index)
        try:
            folder = save_records(self._folder, step, set_name, rows)
        except OSError as error:  # a full disk costs these samples, not the run
            _log.warning("%s of step %d are not written: %s", kind_of(rows), step, error)
            return
        if rows:
            self._each(lambda logger: logger.records(step, set_name, rows, folder), step)

    def close(self, failed: bool = False) -> None:
        """Flush and end all loggers; safe to call twice. `failed` marks the run as crashed in them."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._each(lambda logger: logger.close(failed))
        self._loggers = {}

    def _each(self, act: Callable[[Logger], None], step: int | None = None) -> None:
        """Let each logger act, the one on the terminal first. One that fails is dropped: the run is worth more than its
        log. One that cannot take back what an earlier start logged of `step` is left out.
        """
        for entry, logger in reversed(self._loggers.copy().items()):
            if step is not None and step <= self._repeated and logger.append_only and entry in self._continued:
                continue
            try:
                act(logger)
            except Exception as error:  # whatever its library, or the user's code, raises
                del self._loggers[entry]
                text = error if isinstance(error, OSError) else reason(error)
                _log.warning("the logger %s is off from here on: %s", entry, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # a run that is stopped saves its checkpoint first, while there is time, and closes its loggers after it
        if kind is not Stopped:
            self.close(failed=kind is not None)


class _MetricsFile:
    """metrics.jsonl: one row of strict JSON per step, on disk at once. Rows that a full disk refuses wait in memory."""

    def __init__(self, path: Path, kept: list[dict[str, Any]]) -> None:
        """Begin with these rows of an earlier start: those after its checkpoint will be written again."""
        self._path = path
        self._begin("".join(map(_dump, kept)).encode())
        self._last = kept[-1]["step"] if kept else -1
        before = kept[-1].get(ELAPSED) if kept else None
        self._origin = time.monotonic() - (before or 0.0)
        self._waiting = b""

    def _begin(self, content: bytes) -> None:
        """Write the file anew, with these rows, and open it for more."""
        replace_file(self._path, content)
        self._stream = self._path.open("a+b", buffering=0)

    def write(self, step: int, row: dict[str, float]) -> dict[str, float]:
        """Append a row, and return it with the elapsed time."""
        assert step > self._last, f"metrics: row of step {step} after one of step {self._last}"
        self._last = step
        row = {**row, ELAPSED: round(time.monotonic() - self._origin, 3)}
        self._waiting += _dump({"step": step} | {key: _plain(value) for key, value in row.items()}).encode()
        self._flush()
        return row

    def _flush(self) -> None:
        """Write the waiting rows, all of them or none."""
        size = self._stream.tell()
        try:
            if not self._path.exists():  # somebody has deleted it: what is open still has its rows
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._stream.seek(0)
                deleted = self._stream
                self._begin(deleted.read())
                deleted.close()
            written = self._stream.write(self._waiting)
        except OSError as error:
            written, reason = 0, str(error)
        else:
            reason = "no space left"
        if written == len(self._waiting):
            self._waiting = b""
            return
        self._stream.truncate(size)  # half a row would spoil the file for its readers
        self._stream.seek(size)
        _log.warning("%s: %s; %d rows wait to be written", self._path, reason, self._waiting.count(b"\n"))

    def close(self) -> None:
        if self._waiting:
            self._flush()
        self._stream.close()


def _plain(value: float) -> float | None:
    """A number that strict JSON can hold; None for NaN and infinities."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _dump(row: dict[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"
