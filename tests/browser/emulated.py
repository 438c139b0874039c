"""Emulated runs of many ranks, whose files grow like those of a job."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from phalanx.run.folder_lock import FolderLock
from phalanx.telemetry.records import Record
from tests.helpers.pages import logger

STEP_S = 2.0  # the late rank samples for 1.2 s, the others for 0.4 s, and all update for 0.8 s


class Training:
    """A job that owns the folder. `step` emulates a training step in which all ranks wait for the `late` one."""

    def __init__(self, folder: Path, ranks: int = 4, total: int = 20) -> None:
        self.folder, self.ranks, self.total, self.done = folder, ranks, total, 0
        self._clock = time.time() - 1000
        (folder / "ranks").mkdir(parents=True)
        (folder / "config.yaml").write_text(f"trainer: {{experiment_name: emulated, total_training_steps: {total}}}\n")
        self.log = logger(folder)
        self._lock: FolderLock | None = None
        for rank in range(ranks):
            self._append(rank, {"event": "start", "at": self._clock, "ranks": ranks, "host": "node-0"})
            self.say(rank, f"rank {rank} begins")
        self.beat()

    def __enter__(self) -> Self:
        self._lock = FolderLock(self.folder, lambda _: None, lambda: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.log.close()
        assert self._lock is not None
        self._lock.release()

    def step(self, late: int = 1, **metrics: float) -> None:
        """A training step of all ranks."""
        begin, self.done = self._clock, self.done + 1
        for rank in range(self.ranks):
            self._phase(rank, "rollout", begin, begin + 1.2)
            if rank != late:
                self._append(rank, {"wait": self.done, "from": begin + 0.4, "to": begin + 1.2})
            self._phase(rank, "update", begin + 1.2, begin + STEP_S)
        self._clock += STEP_S
        row = {"reward/mean": 1 - 0.9**self.done, "reward/std": 0.1, "perf/elapsed_s": STEP_S * self.done}
        self.log.log(self.done, row | {"time/rollout": 1.2, "time/update": 0.8} | metrics)
        self.beat()

    def validate(self, *records: Record, name: str = "held_out") -> None:
        """A validation after the last step."""
        self._phase(0, "validation", self._clock, self._clock + 0.5)
        self._clock += 0.5
        self.log.records(self.done, name, list(records))

    def warn(self, rank: int, text: str) -> None:
        """A warning that a rank logs."""
        self._append(rank, {"event": "warning", "at": time.time(), "text": text})

    def say(self, rank: int, text: str) -> None:
        """A line that a rank prints."""
        with (self.folder / "ranks" / f"{rank}.log").open("a") as file:
            file.write(f"{text}\n")

    def beat(self, silent: int | None = None, **more: Any) -> None:
        """Heartbeats of all ranks except a silent one."""
        for rank in range(self.ranks):
            now = time.time() - (60 if rank == silent else 0)
            state = {"rank": rank, "ranks": self.ranks, "role": "actor", "host": f"node-{rank // 8}", "pid": 100 + rank}
            state |= {"at": now, "step": self.done + 1, "phase": "rollout 1/2", "phase_since": now - 1, "interval": 2.0}
            state |= {"total": self.total, "memory_gb": 1.5 + rank, "rate": f"{9 + rank} tokens/s"} | more
            path = self.folder / "ranks" / f"{rank}.json"
            path.with_suffix(".tmp").write_text(json.dumps(state))
            path.with_suffix(".tmp").rename(path)

    def end(self, word: str = "finished") -> None:
        """The final records of the ranks."""
        for rank in range(self.ranks):
            self._append(rank, {"event": word, "at": time.time(), "text": ""})
        self.beat(ended=word)

    def _phase(self, rank: int, name: str, begin: float, end: float) -> None:
        self._append(rank, {"phase": name, "step": self.done, "from": begin, "to": end})

    def _append(self, rank: int, line: dict[str, Any]) -> None:
        with (self.folder / "ranks" / f"{rank}.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n")
