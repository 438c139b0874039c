"""`phalanx runs`, `logs` and `stop`: list the runs below a folder, print a rank's output, and stop a run cleanly.

All three use only the files in a run's folder, so they work on any machine that can access it.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.config.files import json_object
from phalanx.config.inside import list_inside, status_inside
from phalanx.config.messages import aligned, cut
from phalanx.exit import show, show_mistake
from phalanx.run.telemetry.curves import is_count, is_finite
from phalanx.run.telemetry.run_folder import (
    BEAT_S,
    LATEST,
    METRICS_FILE,
    RANKS,
    RUNNING_FILE,
    STOP_FILE,
    read_config,
    read_json,
    read_ranks,
    tail,
    write_json,
)
from phalanx.telemetry.loggers import ELAPSED, setting
from phalanx.tools.board.evaluation_files import ARGUMENTS, ENDED
from phalanx.tools.board.rank_history import RankLines
from phalanx.zoo.loggers.console import plain

LIVING, DEAD = "running", "dead"
NOT_RUNS = {"checkpoints", "images", "samples", "tensorboard", RANKS}  # subfolders of a run that contain no runs
MOST_DEPTH = 32  # of folders below the one that is searched
TAIL_BYTES = 1 << 16  # of metrics.jsonl
LOG_BYTES = 1 << 20  # twice the size to which a rank limits its log
ETA_STEPS = 20  # the ETA uses the median duration of this many recent steps
POLL_S = 0.5
SILENCE_S = 4 * BEAT_S  # time without a heartbeat after which a job counts as dead for `Beats`
MOST_WORDS = 1000  # characters of a job's last words
PATIENCE_S = 20.0  # time without a heartbeat after which a job that was asked to stop counts as dead


@dataclass(frozen=True)
class Overview:
    """The summary of a run: `ranks` holds its ranks' states, `job` the running.json of the job that owns the folder."""

    folder: Path
    state: str
    step: int
    total: int | None
    eta_s: float | None
    ranks: list[dict[str, Any]]
    job: dict[str, Any] | None

    @property
    def hosts(self) -> list[str]:
        """The distinct host names, in the order of ranks."""
        return list(dict.fromkeys(rank["host"] for rank in self.ranks))

    def row(self) -> list[str]:
        """The cells of COLUMNS."""
        steps = f"{self.step}/{self.total}" if self.total is not None else str(self.step)
        eta = "-" if self.eta_s is None or self.state != LIVING else str(timedelta(seconds=round(self.eta_s)))
        first = self.job or (self.ranks[0] if self.ranks else {})
        hosts = self.hosts or ([cut(str(first["host"]))] if "host" in first else [])
        shown = ", ".join(hosts[:3]) + (f" and {len(hosts) - 3} more" if len(hosts) > 3 else "")
        signs = [rank["at"] for rank in self.ranks]
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(signs))) if signs else "-"
        pid = cut(str(first.get("pid", "-")))
        return [str(self.folder), cut(self.state), steps, eta, str(len(self.ranks) or "-"), shown or "-", pid, last]


COLUMNS = ["RUN", "STATE", "STEP", "ETA", "RANKS", "HOSTS", "PID OF RANK 0", "LAST SIGN OF LIFE"]


def overview(folder: Path, state: str, ranks: list[dict[str, Any]] | None = None) -> Overview:
    """Summarize a run from its current files; `state`: see `states`. ranks: their states, None: of the files."""
    rows, ranks = last_rows(folder), read_ranks(folder) if ranks is None else ranks
    step = rows[-1]["step"] if rows else 0
    total = next((rank["total"] for rank in ranks if "total" in rank), None)
    if total is None:  # the last resort, because reading the configuration takes longest
        configured = setting(read_config(folder)[1], "trainer.total_training_steps")
        total = configured if is_count(configured) else None
    seconds = []
    for before, row in pairwise(rows):
        if row["step"] > before["step"] and is_finite(row.get(ELAPSED)) and is_finite(before.get(ELAPSED)):
            seconds.append((row[ELAPSED] - before[ELAPSED]) / (row["step"] - before["step"]))
    left = None if total is None or not seconds else median(seconds[-ETA_STEPS:]) * max(total - step, 0)
    if left is not None and not 0 <= left < LATEST:  # a damaged file may contain any number
        left = None
    return Overview(folder, state, step, total, left, ranks, read_json(folder, RUNNING_FILE))


def states(folders: Sequence[Path]) -> dict[Path, str]:
    """The state of each run: `running`, `dead` (it vanished without recording its end), or its recorded end:
    `finished`, `stopped` or `failed`; `ended` if a version that did not record it wrote the files.
    """
    beats = Beats()
    known = beats.states(folders)
    # the machines' clocks may differ, so wait for another heartbeat before declaring a job dead
    silent = [folder for folder in folders if known[folder] == LIVING and _beat_age(folder) >= 2 * BEAT_S]
    if silent:
        time.sleep(1.5 * BEAT_S)
    for folder in silent:
        known[folder] = beats.state(folder, BEAT_S)
    return known


class Beats:
    """The states of runs, like `states`, but without waiting: it compares the heartbeats of its calls."""

    def __init__(self) -> None:
        self._beats: dict[Path, tuple[dict[str, Any], float]] = {}

    def state(self, folder: Path, silence_s: float | None = None) -> str:
        """The state of a run as it is known now: dead if no call has seen a heartbeat for `silence_s`, or SILENCE_S."""
        job, now = read_json(folder, RUNNING_FILE), time.monotonic()
        if job is None:
            return ended(folder)
        if folder not in self._beats or job != self._beats[folder][0]:
            self._beats[folder] = job, now
        silent_s = now - self._beats[folder][1]
        return LIVING if silent_s < (SILENCE_S if silence_s is None else silence_s) else DEAD

    def states(self, folders: Iterable[Path]) -> dict[Path, str]:
        """The state of each run as it is known now."""
        return {folder: self.state(folder) for folder in folders}


def ended(folder: Path) -> str:
    """How a run has ended, as its first rank recorded it."""
    first = read_json(folder, f"{RANKS}/0.json")
    return "ended" if first is None else str(first.get("ended", DEAD))


def _beat_age(folder: Path) -> float:
    status = status_inside(folder, RUNNING_FILE)
    return float("inf") if status is None else abs(time.time() - status.st_mtime)


def last_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows in the last TAIL_BYTES of a run's metrics.jsonl."""
    try:
        lines = tail(folder, METRICS_FILE, TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    rows = []
    for line in lines:  # the first line may be truncated and then does not parse
        row = json_object(line)
        if row is not None and is_count(row.get("step")):
            rows.append(row)
    return rows


def run_folders(root: Path) -> Iterator[Path]:
    """All folders of runs in `root`, which may itself be one; links are not followed."""
    waiting = [(".", 0)]  # not recursive, because a tree may be deep
    while waiting:
        name, depth = waiting.pop()
        entries = list_inside(root, name)
        has_run = any(not is_folder and entry in (METRICS_FILE, RUNNING_FILE) for entry, is_folder in entries)
        if has_run:
            yield root / name
        for entry, is_folder in reversed(entries):
            if is_folder and depth < MOST_DEPTH and not (has_run and entry in NOT_RUNS):
                waiting.append((f"{name}/{entry}", depth + 1))


def is_run(folder: Path) -> bool:
    """Whether a folder has files of a run."""
    return any((folder / name).exists() for name in (METRICS_FILE, RUNNING_FILE, RANKS))


def check_run(folder: Path) -> Path:
    """Return `folder`, or raise ValueError if it is not a run's."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give the trainer.output_dir of a run")
    if not is_run(folder):
        raise ValueError(f"{folder}: no {METRICS_FILE} or {RUNNING_FILE} in it; give the trainer.output_dir of a run")
    return folder


# --- the commands -----------------------------------------------------------------------------------------------------


def main(command: str, argv: Sequence[str]) -> int:
    """Run the command `runs`, `logs` or `stop`; returns the exit status (2 for a folder that is not a run's)."""
    parser = argparse.ArgumentParser(prog=f"phalanx {command}", description=ABOUT[command])
    if command == "runs":
        parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path("outputs"))
    else:
        parser.add_argument("folder", metavar="RUN", type=Path, help="trainer.output_dir of a run")
    if command == "logs":
        parser.add_argument("--rank", type=int, default=0, help="rank whose output is printed; default 0")
        parser.add_argument("--follow", "-f", action="store_true", help="keep printing new output until the run ends")
        parser.add_argument("--lines", "-n", type=int, help="print only the last LINES lines of the log")
    if command == "stop":
        parser.add_argument("--no-wait", action="store_true", help="return without waiting for the run to stop")
    given = parser.parse_args(argv)
    try:
        if command == "runs":
            return _list_runs(given.folder)
        if command == "logs":
            return _print_logs(check_run(given.folder), given.rank, given.lines, given.follow)
        # an evaluation has none of a run's files once it ended
        is_evaluation = status_inside(given.folder, ARGUMENTS) is not None
        return _stop_run(given.folder if is_evaluation else check_run(given.folder), wait=not given.no_wait)
    except BrokenPipeError:  # as with `phalanx logs RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the remaining output at exit
        return 0
    except (ValueError, OSError) as error:
        return show_mistake(error)
    except KeyboardInterrupt:
        return 130


ABOUT = {
    "runs": "List the runs below a folder, with their machines, progress and status.",
    "logs": "Print the output of a rank of a run.",
    "stop": "Stop a run after it has saved a checkpoint, as SIGTERM does; its command, run again, resumes from there.",
}


def _list_runs(root: Path) -> int:
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder; give one that contains runs")
    folders = list(run_folders(root))
    state = states(folders)
    table = [COLUMNS]
    for folder in folders:
        table.append(overview(folder, state[folder]).row())
    if len(table) == 1:
        return show(f"no runs in {root}")
    return show("\n".join(map(plain, aligned(table, len(COLUMNS)))))


def _print_logs(folder: Path, rank: int, lines: int | None, follow: bool) -> int:
    exists = status_inside(folder, f"{RANKS}/{rank}.log") is not None
    if not exists and not (follow and status_inside(folder, f"{RANKS}/{rank}.json")):
        known = [str(state["rank"]) for state in read_ranks(folder)]
        if str(rank) in known:
            print(f"{folder}: rank {rank} has written nothing", file=sys.stderr)
            return 0
        ranks = f"its ranks are {', '.join(known)}" if known else "it has no files of any rank"
        raise ValueError(f"{folder}: no log of rank {rank}; {ranks}")
    text = log_text(folder, rank)
    shown = text if lines is None else "".join(text.splitlines(keepends=True)[-lines:] if lines > 0 else [])
    sys.stdout.write(plain(shown))
    sys.stdout.flush()
    while follow:
        ends = states([folder])[folder] != LIVING
        newer = log_text(folder, rank)
        sys.stdout.write(plain(_new_text(text, newer)))
        sys.stdout.flush()
        text = newer
        if ends:
            break
        time.sleep(POLL_S)
    return 0


def log_text(folder: Path, rank: int, most: int = LOG_BYTES) -> str:
    """The last `most` bytes of a rank's output. Raises OSError."""
    try:
        return tail(folder, f"{RANKS}/{rank}.log", most).decode("utf-8", "replace")
    except FileNotFoundError:  # the rank has not printed anything yet
        return ""


def _new_text(before: str, now: str) -> str:
    """The new part of a log, whose beginning may have been removed because logs are kept short."""
    if now.startswith(before):
        return now[len(before) :]
    end = before[-500:]
    at = now.rfind(end)
    return now if at < 0 else now[at + len(end) :]


def _stop_run(folder: Path, wait: bool) -> int:
    """Write a request to stop beside running.json, and wait until the job has stopped.

    The request contains the token of the current start, so that a leftover request, for example to a job that died
    in the meantime, cannot stop a later one.
    """
    state = states([folder])[folder]
    job = read_json(folder, RUNNING_FILE)
    if state != LIVING or job is None or not job.keys() >= {"token", "pid", "host"}:
        raise ValueError(f"{folder}: no job runs here (state: {state}); nothing to stop")
    request, named = {"token": job["token"]}, plain(cut(f"process {job['pid']} on {job['host']}"))
    if not isinstance(job["token"], str):
        raise ValueError(f"{folder}: {RUNNING_FILE} is damaged: its token is not a text; nothing to stop")
    try:
        write_json(folder, STOP_FILE, request)
    except OSError as error:
        if read_json(folder, STOP_FILE) != request:  # else another command has just written the same request
            reason = f"{folder}: the request cannot be written ({error.strerror}); "
            raise ValueError(f"{reason}run this as the user of the job, or send SIGTERM to its launcher") from error
    show(f"asked {named} to stop")
    if not wait:
        return 0
    beat, since = job, time.monotonic()
    while (now := read_json(folder, RUNNING_FILE)) is not None and now.get("token") == job["token"]:
        if now != beat:
            beat, since = now, time.monotonic()
        if time.monotonic() - since > PATIENCE_S:
            raise ValueError(f"{folder}: {named} died before it stopped")
        time.sleep(POLL_S)
    failed, words = _last_words(folder)
    show(words)
    return int(failed)


def _last_words(folder: Path) -> tuple[bool, str]:
    """Whether a job that was asked to stop has failed, and a description of its end, if possible the job's own."""
    if status_inside(folder, ARGUMENTS) or status_inside(folder, f"baseline/{ARGUMENTS}"):
        end = read_json(folder, ENDED) or {}
        return end.get("ended") not in ("finished", "stopped"), plain(cut(str(end.get("text", "failed")), MOST_WORDS))
    last = overview(folder, ended(folder))
    failed = last.state == "failed"
    lead = next((state["rank"] for state in last.ranks if state.get("role") == "actor"), 0)
    lines = RankLines(folder, lead)
    lines.read()
    for event in reversed(lines.events):  # the same text may follow the end as an event `said`
        if event["event"] == "start":
            break
        if event["event"] == "stopped":
            return failed, plain(str(event.get("text") or "stopped"))
    return failed, f"{last.state} after step {last.step}" + (f" of {last.total}" if last.total is not None else "")
