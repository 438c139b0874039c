"""What a pretended accelerator has seen: faults, host syncs, copies and collectives, by phase of the job and place."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

Place = tuple[str, str, str]  # the job's phase, what happened, and the function of phalanx in which it did


class Fault(RuntimeError):
    """Something that CUDA would refuse, or would do at another time than the program means."""


@dataclass
class Record:
    """Counts of one process."""

    phase: str = "start"
    syncs: Counter[Place] = field(default_factory=Counter)
    copied: Counter[Place] = field(default_factory=Counter)  # bytes between host and device
    collectives: Counter[Place] = field(default_factory=Counter)
    groups: dict[str, str] = field(default_factory=dict)  # back ends by name
    faults: list[str] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)  # of engines, each after the phase that it happened in
    operators: int = 0
    tape: list[Any] | None = None  # of the graph that is being made

    def sync(self, what: str) -> None:
        """The host waits for the device."""
        if self.tape is not None:
            self.fault(f"{what} within a graph")
        self.syncs[self.phase, what, caller()] += 1

    def event(self, what: str) -> None:
        """An engine wakes, sleeps or answers."""
        self.events.append((self.phase, what))

    def note(self, message: str) -> str:
        """Keep a fault that cannot be raised where it happens."""
        text = f"{message} (in {caller()}, phase {self.phase})"
        self.faults.append(text)
        return text

    def fault(self, message: str) -> NoReturn:
        raise Fault(self.note(message))

    def waits(self) -> Counter[str]:
        """Host syncs by phase."""
        total: Counter[str] = Counter()
        for (phase, _, _), count in self.syncs.items():
            total[phase] += count
        return total


def caller() -> str:
    """The innermost function of phalanx that is running, as `training/offload.py:OffloadedState.visits`."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        _, _, path = frame.f_code.co_filename.rpartition("/src/phalanx/")
        if path != frame.f_code.co_filename:
            return f"{path}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "-"


RECORD = Record()
