"""The ranks of a run over time, from the files of phalanx.run.telemetry.rank_files: the timeline of a step, the ranks
for which others waited, and events. page/ranks.js draws the result on the live page and in the report.
"""

import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from phalanx.config.files import json_object
from phalanx.config.messages import MOST_SHOWN
from phalanx.run.telemetry.curves import is_count, is_finite
from phalanx.run.telemetry.growing_file import GrowingFile
from phalanx.run.telemetry.run_folder import LATEST, LONGEST_EVENT, RANKS, at_once, read_ranks

MAX_LINES = 4000  # phases, and likewise waits, that are kept of a rank
MOST_LINES = 600_000  # of all ranks
MOST_KNOWN = 5000  # lines of events of a rank that are recognized when they are read again
MAX_EVENTS = 200
MOST_BYTES = 1 << 22  # read at once: eight times the size to which a rank limits its file
MOST_READ = 1 << 25  # bytes read at once of all ranks but the first, which has the events of the job
SOON_S = 0.2  # in which all files are usually read; what it takes longer is followed by a pause
PAUSE = 4  # times as long
MAX_SPANS = 40_000  # of a timeline
COMMON = {"start", "finished", "stopped"}  # events that all ranks share and that are shown once
TOGETHER_S = 60.0  # within which a text that several ranks repeat, or that one repeats as it ends, is one message
NOTED = ("checkpoint", "validation")  # phases of the first rank of each role that are shown as events


class Span(NamedTuple):
    """A phase of a step, or a wait in a collective with a number, in seconds of time.time(); `start`: of which start of
    the job.
    """

    name: str
    number: int
    begin: float
    end: float
    start: int


class RankLines:
    """Reads the lines of a rank's `.jsonl` incrementally. `limit`: the number of phases, and of waits, that are kept;
    of events, a twentieth of it. most: bytes that are read at once, the last ones of a longer file.
    """

    def __init__(self, folder: Path, rank: int, limit: int = MAX_LINES, most: int = MOST_BYTES) -> None:
        self.events = deque[dict[str, Any]](maxlen=1 + limit // 20)
        self.phases, self.waits = deque[Span](maxlen=limit), deque[Span](maxlen=limit)
        self._known: dict[int, None] = {}  # hashes of the last lines of events
        self._starts = 0
        self._file = GrowingFile(folder, f"{RANKS}/{rank}.jsonl", most, self._start_over)

    def _start_over(self) -> None:
        self._starts = 0
        self.phases.clear()
        self.waits.clear()

    def read(self) -> None:
        """Read new lines. A file that was truncated at its front is read from its beginning, skipping known events."""
        with suppress(OSError):
            for _, line in self._file.lines():
                self._add_line(line)

    def _add_line(self, line: bytes) -> None:
        value = json_object(line) or {}
        if "event" in value:
            self._starts += value["event"] == "start"
            # identify events by their lines, not by their times, because a clock may be set back
            if _is_time(value.get("at")) and hash(line) not in self._known:
                self._known[hash(line)] = None
                if len(self._known) > MOST_KNOWN:
                    del self._known[next(iter(self._known))]
                self.events.append(_shown_event(value))
            return
        begin, end, step, wait = (value.get(name) for name in ("from", "to", "step", "wait"))
        if not (_is_time(begin) and _is_time(end)):
            return  # a damaged line, as a full disk leaves it
        if isinstance(value.get("phase"), str) and is_count(step):
            self.phases.append(Span(sys.intern(value["phase"][:MOST_SHOWN]), step, begin, end, self._starts))
        elif is_count(wait):
            self.waits.append(Span("wait", wait, begin, end, self._starts))


def _is_time(value: Any) -> TypeGuard[float]:
    return is_finite(value) and abs(value) < LATEST


def _shown_event(value: dict[str, Any]) -> dict[str, Any]:
    """An event as it is shown; the file may be damaged or written by others."""
    event = {"event": str(value["event"])[:MOST_SHOWN], "at": value["at"]}
    event["text"] = str(value.get("text") or "")[:LONGEST_EVENT]
    event["ranks"] = value["ranks"] if is_count(value.get("ranks")) else None
    return event | {"host": str(value.get("host"))[:MOST_SHOWN]}


class RankHistory:
    """The history of one run's ranks; `read` reads new states and lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lines: dict[int, RankLines] = {}
        self._ranks: list[dict[str, Any]] = []
        self._due = 0.0  # when the files may be read again, by time.monotonic

    def read(self) -> list[dict[str, Any]]:
        """The states of the ranks. If reading all files takes long, they are not read in each call."""
        begin = time.monotonic()
        if begin < self._due:
            return self._ranks
        self._ranks = read_ranks(self.folder)
        for state in self._ranks:
            number = state["rank"]
            if number not in self._lines:
                share = 1 if number == 0 else len(self._ranks)
                limit = min(MAX_LINES, 1 + MOST_LINES // len(self._ranks))
                self._lines[number] = RankLines(self.folder, number, limit, min(MOST_BYTES, MOST_READ // share))
        at_once(RankLines.read, [self._lines[state["rank"]] for state in self._ranks])
        end = time.monotonic()
        self._due = end + PAUSE * max(end - begin - SOON_S, 0)
        return self._ranks

    def data(self, step: int | None = None, done: int | None = None, shown: Collection[str] = ()) -> dict[str, Any]:
        """The ranks, the timeline of a step (default: the last complete one) and the events, for page/ranks.js. done:
        the last step with a row of metrics, if known; a later one was interrupted. shown: messages that the page shows
        elsewhere.

        Times of ranks and events are those of time.time(); times of the timeline are seconds since its begin.
        """
        ranks = self.read()
        lines = {state["rank"]: self._lines[state["rank"]] for state in ranks}
        return {
            "now": time.time(),
            "ranks": ranks,
            "events": _last_events(ranks, lines, shown),
            **self._step_timeline(ranks, lines, step, done),
        }

    def _step_timeline(
        self, ranks: list[dict[str, Any]], lines: dict[int, RankLines], step: int | None, done: int | None
    ) -> dict[str, Any]:
        """The time window of a step on the first rank that trains, with the phases and waits of all ranks in it."""
        lead = next((state for state in ranks if state.get("role") == "actor"), None)
        phases = [] if lead is None else [line for line in lines[lead["rank"]].phases if line.number > 0]
        steps = sorted({line.number for line in phases})
        if lead is None or not steps:
            return {"steps": [], "step": None, "spans": [], "waits": [], "blame": []}
        is_running = "ended" not in lead and lead.get("step") == steps[-1]
        if len(steps) > 1 and (is_running or (done is not None and steps[-1] > done)):
            steps = steps[:-1]  # the last step is still running, or was interrupted
        step = steps[-1] if step is None else min(max(step, steps[0]), steps[-1])
        of_step = [line for line in phases if line.number == step]
        newest = of_step[-1].start  # an earlier start of the job may have begun this step too
        begin = min(line.begin for line in of_step if line.start == newest)
        end = max(line.end for line in of_step if line.start == newest)
        window: dict[str, Any] = {"steps": [steps[0], steps[-1]], "step": step, "begin": begin, "seconds": end - begin}
        return window | _spans_within(ranks, lines, begin, end)


def _spans_within(ranks: list[dict[str, Any]], lines: dict[int, RankLines], begin: float, end: float) -> dict[str, Any]:
    """Phases [rank, name, from, to] and waits [rank, the rank that is waited for, from, to] between two times."""
    spans: list[list[Any]] = []
    waits: list[list[Any]] = []
    met: dict[tuple[str, int], list[tuple[int, float, float]]] = {}  # by role and number: each role numbers its waits
    for state in ranks:
        rank = state["rank"]
        for line, first, last in _clipped_spans(lines[rank].phases, begin, end):
            spans.append([rank, line.name, first, last])
        for line, first, last in _clipped_spans(lines[rank].waits, begin, end):
            met.setdefault((str(state.get("role")), line.number), []).append((rank, first, last))
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


def _clipped_spans(lines: Iterable[Span], begin: float, end: float) -> Iterator[tuple[Span, float, float]]:
    """The spans between two times, each with its ends there in seconds after the first."""
    for line in lines:
        if line.begin < end and line.end > begin:
            yield line, round(max(line.begin - begin, 0.0), 5), round(min(line.end, end) - begin, 5)


def _last_events(
    ranks: list[dict[str, Any]], lines: dict[int, RankLines], shown: Collection[str]
) -> list[dict[str, Any]]:
    """The last events of all ranks, ordered by time; the text of a start gives its number of ranks."""
    events, size, told = [], None, dict[str, list[float]]()
    shown = [text[:LONGEST_EVENT] for text in shown]
    firsts: dict[str, int] = {}
    for state in ranks:
        firsts.setdefault(str(state.get("role")), state["rank"])
    closing = firsts.get("actor", min(lines, default=0))
    for rank, of_rank in lines.items():
        for line in of_rank.events:
            event = {"at": line["at"], "rank": rank, "kind": line["event"], "text": line["text"]}
            # all ranks warn of the same, and end with the same error
            times = told.setdefault(event["text"], []) if event["text"] else []
            is_repeated = any(abs(event["at"] - at) < TOGETHER_S for at in times)
            is_spoken_for = event["kind"] in COMMON and rank != (0 if event["kind"] == "start" else closing)
            if is_spoken_for or is_repeated or event["text"] in shown:
                continue
            times.append(event["at"])
            if event["kind"] == "start":
                event["text"] = f"{line['ranks']} ranks, the first on {line['host']}"
                if size is not None:
                    event["kind"] = "restart"
                    event["text"] += f" (before: {size} ranks)" if size != line["ranks"] else ""
                size = line["ranks"]
            events.append(event)
        if rank not in firsts.values():
            continue
        for span in of_rank.phases:
            times = told.setdefault(f"{span.name} {span.number}", [])  # each role has the phase
            is_repeated = any(abs(span.end - at) < TOGETHER_S for at in times)
            if span.name.endswith(NOTED) and not is_repeated:
                times.append(span.end)
                text = f"after step {span.number}, {span.end - span.begin:.2g} s"
                events.append({"at": span.end, "rank": rank, "kind": span.name, "text": text})
    return sorted(events, key=lambda event: event["at"])[-MAX_EVENTS:]
