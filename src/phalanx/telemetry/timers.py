"""Seconds per phase of a training step, and which rows of metrics are of one."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

MAX_SPANS = 4096  # finished phases that are waiting to be written


@dataclass
class Phase:
    """The current phase: `done` of `expected` micro-batches (0: unknown) since `since`, by time.perf_counter."""

    name: str
    done: int = 0
    expected: int = 0
    since: float = field(default_factory=time.perf_counter)

    def __str__(self) -> str:
        if not self.done and not self.expected:
            return self.name
        return f"{self.name} {self.done}/{self.expected}" if self.expected else f"{self.name} {self.done}"


class Timers:
    """Seconds per phase: `with timers("rollout"): ...`, then `timers.pop()` once per step. `phase` is the current one;
    it may count micro-batches.

    Nothing waits for the device: phases that end by reading a value on the host are exact on a GPU, and others leave
    work to the next phase.

    `spans` holds the most recent phases that ended, each as (name, training step from 1, begin, end), for the thread of
    phalanx.run.telemetry.rank_files. `step` is the current training step, 0 before the first one, and `rate` the
    throughput of this rank in its last step, as text.

    Each phase also enters `range(name)` and each step `profiler(step)`, which do nothing unless the step is profiled.
    """

    def __init__(self, *, part: str = "", whole: "Timers | None" = None) -> None:
        """With `part` and `whole`: timers of a part, such as one of two policies, which record their phases in the
        whole's timers with the part's name as a prefix.
        """
        self._before = f"{part}_" if part else ""
        self._whole = self if whole is None else whole
        self._seconds: dict[str, float] = {} if whole is None else whole._seconds
        self._phase = Phase("")
        self.step, self.rate = 0, ""
        self.spans: deque[tuple[str, int, float, float]] = deque(maxlen=MAX_SPANS)
        self.range: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.profiler: Callable[[int], AbstractContextManager[object]] = nullcontext

    @contextmanager
    def training_step(self, number: int) -> Iterator[None]:
        """Mark the `with` block as training step `number`, counted from 1."""
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
        outer, self.phase = self.phase, Phase(f"{self._before}{name}")
        start = time.perf_counter()
        try:
            with self._whole.range(self.phase.name):
                yield
        finally:
            end = time.perf_counter()
            self.add(name, end - start)
            self._whole.spans.append((self.phase.name, self._whole.step, start, end))
            self.phase = outer

    def expect(self, micro_batches: int) -> None:
        """Set the number of micro-batches of the phase."""
        self.phase = replace(self.phase, done=0, expected=micro_batches)

    def advance(self) -> None:
        """Count a finished micro-batch of the phase."""
        self.phase.done += 1

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere, for example by a worker thread; call this from the main thread."""
        name = f"{self._before}{name}"
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def note_rate(self, per_second: float, noun: str) -> None:
        """Store this rank's throughput in the last step."""
        self._whole.rate = f"{per_second:.4g} {noun}/s"

    def seconds(self, name: str) -> float:
        """Seconds of a phase since the last `pop`."""
        return self._seconds.get(f"{self._before}{name}", 0.0)

    def pop(self) -> dict[str, float]:
        """Return `{"time/<phase>": seconds}` since the last call, in the order of first use, and reset all phases."""
        row = {f"time/{name}": value for name, value in self._seconds.items()}
        self._seconds.clear()
        return row


def is_training_row(row: dict[str, Any]) -> bool:
    """Whether a row belongs to a training step; a validation before training logs only val/, time/ and a clock."""
    return any(not key.startswith(("val/", "time/", "perf/elapsed_s")) and key != "step" for key in row)
