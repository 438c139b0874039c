"""The ranks of a run over time, from the files of phalanx.telemetry.rank_files: the timeline of a step, the ranks for
which others waited, and events. page/ranks.js draws the result on the live page and in the report.
"""

import math
import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phalanx.config.files import json_object
from phalanx.telemetry.run_folder import RANKS, inside, is_finite, read_ranks

MAX_LINES = 4000  # phases, and likewise waits, that are kept of a rank; events are rarer and all kept
MAX_EVENTS = 200
MOST_BYTES = 1 << 22  # read at once: eight times the size to which a rank limits its file
MAX_SPANS = 40_000  # of a timeline
COMMON = {"start", "finished", "stopped"}  # events that all ranks share and that are shown once
ENDS = {"said", "failed", "error"}  # events that are shown once if several ranks repeat their text within TOGETHER_S
TOGETHER_S = 60.0
NOTED = ("checkpoint", "validation")  # phases of the first rank of each role that are shown as events


class RankLines:
    """Reads the lines of a rank's `.jsonl` incrementally."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[dict[str, Any]] = []
        self._known: set[bytes] = set()  # the lines of these events
        self._start_over()

    def _start_over(self, file: int = 0) -> None:
        self._file, self._offset, self._rest, self._starts = file, 0, b"", 0
        self.phases, self.waits = deque[dict[str, Any]](maxlen=MAX_LINES), deque[dict[str, Any]](maxlen=MAX_LINES)

    def read(self) -> None:
        """Read new lines. A file that was truncated at its front is read from its beginning, skipping known events."""
        try:
            with self.path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                if number != self._file:
                    self._start_over(number)
                begin = file.seek(max(self._offset, file.seek(0, os.SEEK_END) - MOST_BYTES))
                data = (self._rest if begin == self._offset else b"") + file.read(MOST_BYTES)
                self._offset = file.tell()
        except OSError:
            return
        *lines, self._rest = data.split(b"\n")
        recent = len(lines) - 2 * MAX_LINES
        for i, line in enumerate(lines):
            if i < recent and not line.startswith(b'{"event"'):
                continue
            value = json_object(line) or {}
            if "event" in value:
                self._starts += value["event"] == "start"
                # identify events by their lines, not by their times, because a clock may be set back
                if is_finite(value.get("at")) and line not in self._known:
                    self._known.add(line)
                    self.events.append(value)
            elif not (is_finite(value.get("from")) and is_finite(value.get("to"))):
                continue  # a damaged line, as a full disk leaves it
            elif isinstance(value.get("phase"), str) and isinstance(value.get("step"), int):
                self.phases.append(value | {"start": self._starts})
            elif isinstance(value.get("wait"), int):
                self.waits.append(value)


class RankHistory:
    """The history of one run's ranks; `data` reads new lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: dict[int, RankLines] = {}

    def data(self, step: int | None = None) -> dict[str, Any]:
        """The ranks, the timeline of a step (default: the last complete one) and the events, for page/ranks.js.

        Times of ranks and events are those of time.time(); times of the timeline are seconds since its begin.
        """
        ranks = read_ranks(self.folder)
        for state in ranks:
            number = state["rank"]
            if number not in self._lines:
                self._lines[number] = RankLines(inside(self.folder, self.folder / RANKS / f"{number}.jsonl"))
            self._lines[number].read()
        lines = {state["rank"]: self._lines[state["rank"]] for state in ranks}
        return {
            "now": time.time(),
            "ranks": ranks,
            "events": _events(ranks, lines),
            **self._timeline(ranks, lines, step),
        }

    def _timeline(self, ranks: list[dict[str, Any]], lines: dict[int, RankLines], step: int | None) -> dict[str, Any]:
        """The time window of a step on the first rank that trains, with the phases and waits of all ranks in it."""
        lead = next((state for state in ranks if state.get("role") == "actor"), None)
        phases = [] if lead is None else [line for line in lines[lead["rank"]].phases if line["step"] > 0]
        steps = sorted({line["step"] for line in phases})
        if lead is None or not steps:
            return {"steps": [], "step": None, "spans": [], "waits": [], "blame": []}
        if "ended" not in lead and len(steps) > 1 and lead.get("step") == steps[-1]:
            steps = steps[:-1]  # the last step is still running
        step = steps[-1] if step is None else min(max(step, steps[0]), steps[-1])
        of_step = [line for line in phases if line["step"] == step]
        newest = of_step[-1]["start"]  # an earlier start of the job may have begun this step too
        begin = min(line["from"] for line in of_step if line["start"] == newest)
        end = max(line["to"] for line in of_step if line["start"] == newest)
        window: dict[str, Any] = {"steps": [steps[0], steps[-1]], "step": step, "begin": begin, "seconds": end - begin}
        return window | _within(ranks, lines, begin, end)


def _within(ranks: list[dict[str, Any]], lines: dict[int, RankLines], begin: float, end: float) -> dict[str, Any]:
    """Phases [rank, name, from, to] and waits [rank, the rank that is waited for, from, to] between two times."""
    spans: list[list[Any]] = []
    waits: list[list[Any]] = []
    met: dict[tuple[str, int], list[tuple[int, float, float]]] = {}  # by role and number: each role numbers its waits
    for state in ranks:
        rank = state["rank"]
        for line in _overlapping(lines[rank].phases, begin, end):
            spans.append([rank, line["phase"], *_clipped(line, begin, end)])
        for line in _overlapping(lines[rank].waits, begin, end):
            part = _clipped(line, begin, end)
            met.setdefault((str(state.get("role")), line["wait"]), []).append((rank, *part))
    blame: dict[int, float] = {}
    for (role, _), parts in met.items():
        # All ranks leave a collective together, so the last one to arrive waited least, perhaps too briefly to be
        # recorded.
        waited = dict.fromkeys((state["rank"] for state in ranks if str(state.get("role")) == role), 0.0)
        for rank, first, last in parts:
            waited[rank] = last - first
        late = min(waited, key=lambda rank: waited[rank])
        for rank, first, last in parts:
            waits.append([rank, late, first, last])
            if rank != late:
                blame[late] = blame.get(late, 0.0) + last - first
    worst = sorted(blame.items(), key=lambda item: -item[1])
    return {"spans": spans[-MAX_SPANS:], "waits": waits[-MAX_SPANS:], "blame": worst[:8]}


def _overlapping(lines: Iterable[dict[str, Any]], begin: float, end: float) -> list[dict[str, Any]]:
    return [line for line in lines if line["from"] < end and line["to"] > begin]


def _clipped(line: dict[str, Any], begin: float, end: float) -> tuple[float, float]:
    return round(max(line["from"] - begin, 0.0), 5), round(min(line["to"], end) - begin, 5)


def _events(ranks: list[dict[str, Any]], lines: dict[int, RankLines]) -> list[dict[str, Any]]:
    """The last events of all ranks, ordered by time; the text of a start gives its number of ranks."""
    events, size, told = [], None, dict[str, float]()
    firsts: dict[str, int] = {}
    for state in ranks:
        firsts.setdefault(str(state.get("role")), state["rank"])
    closing = firsts.get("actor", min(lines, default=0))
    for rank, of_rank in lines.items():
        for line in of_rank.events:
            event = {"at": line["at"], "rank": rank, "kind": str(line["event"]), "text": str(line.get("text", ""))}
            # all ranks end with the same error
            is_repeated = abs(event["at"] - told.get(event["text"], -math.inf)) < TOGETHER_S
            is_spoken_for = event["kind"] in COMMON and rank != (0 if event["kind"] == "start" else closing)
            if is_spoken_for or (event["kind"] in ENDS and is_repeated):
                continue
            told[event["text"]] = event["at"]
            if event["kind"] == "start":
                event["text"] = f"{line.get('ranks')} ranks, the first on {line.get('host')}"
                if size is not None:
                    event["kind"] = "restart"
                    event["text"] += f" (before: {size} ranks)" if size != line.get("ranks") else ""
                size = line.get("ranks")
            events.append(event)
        if rank not in firsts.values():
            continue
        for line in of_rank.phases:
            if line["phase"].endswith(NOTED):
                text = f"after step {line['step']}, {line['to'] - line['from']:.2g} s"
                events.append({"at": line["to"], "rank": rank, "kind": line["phase"], "text": text})
    return sorted(events, key=lambda event: event["at"])[-MAX_EVENTS:]
