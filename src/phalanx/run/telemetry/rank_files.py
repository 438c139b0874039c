"""The files of each rank in a run's folder, which `phalanx watch`, `runs` and `logs` read:

- `ranks/<rank>.json`: the current state of the rank, replaced once per interval;
- `ranks/<rank>.jsonl`: a line for each start, phase, wait in a collective, warning and error;
- `ranks/<rank>.log`: a copy of what the rank prints through Python.

A background thread writes them, so that training never waits for a disk; training only appends to queues (see
phalanx.run.telemetry.run_logger.Timers). The latter two files keep at most the newest MAX_BYTES.

All ranks share one file system. The interval grows with their number, so that all together write at most STATES_PER_S
states and lists of phases per second, in turns. What is rare does not wait for that: output, warnings, errors, and the
end of the job.
"""

import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

from phalanx import exit
from phalanx.config.inside import append_inside, make_inside, write_inside
from phalanx.distributed.collectives import waits
from phalanx.distributed.mesh import World
from phalanx.exit import Stopped
from phalanx.run.telemetry.run_folder import LONGEST_EVENT, RANKS, tail, write_json
from phalanx.telemetry.step_metrics import peak_memory_gb
from phalanx.telemetry.timers import Timers

MAX_BYTES = 1 << 19
STATES_PER_S = 20  # of all ranks together
LAST_WORDS_S = 1.0  # limit for writing a rank's final output, because a hanging disk must not delay its exit
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_log = logging.getLogger(__name__)


class RankFiles:
    """A context in which a thread writes this rank's files into `folder`.

    `total_steps` is None if the rank does not know it. If the files cannot be written, the job goes on without them.
    """

    def __init__(self, folder: Path, world: World, timers: Timers, total_steps: int | None) -> None:
        watch = world.watch
        self._folder, self._world, self._timers = folder, world, timers
        self._names = {ending: f"{RANKS}/{watch.rank}.{ending}" for ending in ("json", "jsonl", "log")}
        self._interval = watch.interval
        self._state_interval = max(self._interval, len(watch.hosts) / STATES_PER_S)
        self._due = 0.0  # when the next state is written, by time.monotonic
        self._state: dict[str, Any] = {
            "rank": watch.rank,
            "ranks": len(watch.hosts),
            "role": world.role,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": time.time(),
            "interval": self._state_interval,
            "total": total_steps,
        }
        self._offset = time.time() - time.perf_counter()
        self._text, self._events = deque[str](maxlen=1 << 14), deque[dict[str, Any]](maxlen=1 << 10)
        self._turn = threading.Condition()
        self._asked = self._answered = 0  # numbers of the latest request to write at once, and the latest served
        self._done = False
        self._thread = threading.Thread(target=self._run_writer, name="rank files", daemon=True)
        self._handler = _Warnings(self._events)
        self._has_failed = False

    def __enter__(self) -> Self:
        self._events.append({"event": "start", "at": time.time(), **self._state})
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (cast(TextIO, _Copy(stream, self._hear)) for stream in self._streams)
        logging.getLogger().addHandler(self._handler)
        self._copied_before, exit.copy = exit.copy, self._copy_line
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = "finished" if error is None else "stopped" if isinstance(error, Stopped) else "failed"
        text = "" if error is None else exit.hide(str(error) or type(error).__name__)
        logging.getLogger().removeHandler(self._handler)
        for name, stream in zip(("stdout", "stderr"), self._streams, strict=True):
            current = sys.stdout if name == "stdout" else sys.stderr
            if isinstance(current, _Copy):  # the progress line may have replaced the stream since
                setattr(sys, name, stream)
        self.end(end, text)
        if error is None:  # after an error, its report is still to be printed and copied
            self.close()

    def end(self, word: str, text: str = "") -> None:
        """Write what is queued, and how the job has ended; once for each way."""
        if self._state.get("ended") != word:
            self._events.append({"event": word, "at": time.time(), "text": text[:LONGEST_EVENT]})
            self._state["ended"] = word
        self.flush()

    def close(self) -> None:
        """End the thread; nothing more is copied."""
        exit.copy = self._copied_before
        with self._turn:
            self._done = True
            self._turn.notify_all()

    # -- called by the training ------------------------------------------------------------------------------------

    def _hear(self, text: str) -> None:
        if os.getpid() == self._state["pid"]:  # ignore the output of forked children
            self._text.append(text)

    def _copy_line(self, words: str, last: bool) -> None:
        """Copy a line that bypasses sys.stderr; if it may be the last one of this process, write it now."""
        self._hear(f"{words}\n")
        if not last or os.getpid() != self._state["pid"]:
            return
        self._events.append({"event": "said", "at": time.time(), "text": words[:LONGEST_EVENT]})
        self.flush()

    def flush(self) -> None:
        """Wait until the thread has written everything queued so far, for at most LAST_WORDS_S."""
        if threading.current_thread() is self._thread:
            return
        with self._turn:
            self._asked += 1
            number = self._asked
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._answered >= number, LAST_WORDS_S)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run_writer(self) -> None:
        while not self._done:
            number = self._asked
            try:
                self._write_queued()
            except OSError as error:
                if not self._has_failed:
                    _log.error("%s: %s; phalanx watch cannot show this rank", exit.place(), error)
                self._has_failed = True
            with self._turn:
                self._answered = number
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._done or self._asked > self._answered, self._interval)

    def _write_queued(self) -> None:
        """Write the events and texts queued since the last call; if it is due, the phases, waits and state, too."""
        is_due = self._asked > self._answered or time.monotonic() >= self._due
        if not (is_due or self._events or self._text):
            return
        # without parents, because only rank 0 recreates the folder of a run after it was deleted
        make_inside(self._folder, RANKS)
        lines = []
        for event in _take_entries(self._events):
            lines.append(json.dumps(event))
        if is_due:
            lines += self._span_lines()
        if lines:
            _append_text(self._folder, self._names["jsonl"], "\n".join([*lines, ""]))
        text = exit.hide(CONTROL.sub("", "".join(_take_entries(self._text))))
        if text:
            _append_text(self._folder, self._names["log"], text)
        if is_due:
            # from the first state on, which all write at once, the ranks take turns
            turn = (1 + self._state["rank"]) / self._state["ranks"] if self._due == 0 else 1.0
            self._due = time.monotonic() + turn * self._state_interval
            self._write_state()

    def _span_lines(self) -> list[str]:
        """The lines of the phases and waits that have ended since the last call."""
        lines = []
        for name, step, begin, end in _take_entries(self._timers.spans):
            lines.append(
                f'{{"phase":"{name}","step":{step},"from":{self._wall_time(begin)},"to":{self._wall_time(end)}}}'
            )
        for number, begin, end in _take_entries(waits):
            lines.append(f'{{"wait":{number},"from":{self._wall_time(begin)},"to":{self._wall_time(end)}}}')
        return lines

    def _write_state(self) -> None:
        phase = self._timers.phase
        state = self._state | {
            "at": time.time(),
            "step": self._timers.step,
            "rate": self._timers.rate,
            "phase": str(phase),
            "phase_since": self._wall_time(phase.since),
            "memory_gb": peak_memory_gb(self._world.device),
        }
        write_json(self._folder, self._names["json"], state)

    def _wall_time(self, moment: float) -> float:
        """Convert time.perf_counter to time.time."""
        return round(moment + self._offset, 6)


class _Copy:
    """A stream that also passes everything written to it to `hear`."""

    def __init__(self, stream: TextIO, hear: Callable[[str], object]) -> None:
        self._stream, self._hear = stream, hear

    def write(self, text: str) -> int:
        self._hear(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Warnings(logging.Handler):
    """Records each warning and error as an event."""

    def __init__(self, events: deque[dict[str, Any]]) -> None:
        super().__init__(logging.WARNING)
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()[:LONGEST_EVENT]
        self._events.append({"event": record.levelname.lower(), "at": record.created, "text": text})


def _take_entries(queue: deque[Any]) -> list[Any]:
    """Remove and return the entries of a queue to which another thread may append."""
    entries = []
    for _ in range(len(queue)):
        entries.append(queue.popleft())
    return entries


def _append_text(folder: Path, name: str, text: str) -> None:
    """Append to a file, and drop its older half when it exceeds MAX_BYTES."""
    with append_inside(folder, name) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
        size = file.tell()
    if size > MAX_BYTES:
        kept = tail(folder, name, MAX_BYTES // 2)
        write_inside(folder, name, kept[kept.find(b"\n") + 1 :])
