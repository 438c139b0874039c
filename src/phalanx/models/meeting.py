"""Jobs side by side in one process: each on a thread of its own, one at a time, until all of them ask for something.

A thread has its turn until it asks: for a pass through a model, for a backward pass, or just to let the others go on.
When all have asked, equal requests are answered together. Then the threads go on, one by one in the order of the jobs.
So everything between two requests, such as collectives, has the same order on all ranks if each job asks equally often
on all of them.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Together = Callable[[list[Any]], Sequence[Any]]
BACKWARD, PAUSE = "backward", "pause"
_thread = threading.local()  # `seat`: the Seat of a thread in a meeting
_rows: dict[int, int] = {}  # see `adapters`


class Disbanded(BaseException):
    """Raised in a thread of a meeting in which nobody gets a turn any more."""


@dataclass
class _Request:
    """A job's request: `together` answers the values of all requests of this key and mode of gradients at once."""

    key: Hashable
    value: Any
    together: Together
    grad: bool = field(default_factory=torch.is_grad_enabled)
    answer: Any = None
    error: Exception | None = None


class Meeting:
    """Jobs 0 to `count` - 1, each of which runs on one thread within `seat`. shared: parts by key, see `shared` below.

    agree: whether all ranks have the same value. If a pass communicates, they must join the same requests.
    """

    agree: Callable[[object], bool] | None = None

    def __init__(self, count: int, shared: dict[Hashable, Any]) -> None:
        self.shared = shared
        self._gates = [threading.Semaphore(0) for _ in range(count)]  # each is opened when its job has the turn
        self._live = list(range(count))
        self._due = list(range(count))  # those that have a turn before requests are answered again
        self._requests: dict[int, _Request] = {}
        self._disbanded = False
        # By job: those whose rows are in the graph of its passes. One backward pass frees the graph for all of them.
        self._joined: dict[int, set[int]] = defaultdict(set)
        self._pass_on()

    @contextmanager
    def seat(self, number: int, name: str) -> Iterator["Seat"]:
        """In the thread of job `number`, from its first turn on. Name: for messages.

        At the end the job leaves the meeting, and the others go on; after an exception, nobody gets the turn any more.
        """
        self._wait(number)
        _thread.seat = Seat(self, number, name)
        try:
            yield _thread.seat
        finally:
            del _thread.seat
        self._live.remove(number)
        self._pass_on()

    def disband(self) -> None:
        """After an exception of one job, end the threads of all others, which wait for a turn: they raise Disbanded."""
        self._disbanded = True
        for gate in self._gates:
            gate.release()

    def _wait(self, number: int) -> None:
        self._gates[number].acquire()
        if self._disbanded:
            raise Disbanded

    def _pass_on(self) -> None:
        """Give the turn to the next job; if all have asked, answer their requests first."""
        if not self._due and self._live:
            self._answer_requests()
            self._due = sorted({*self._live}.difference(self._requests))
        if self._due:
            self._gates[self._due.pop(0)].release()

    def _answer_requests(self) -> None:
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number in self._live:
            request = self._requests[number]
            groups[request.key, request.grad].append(number)
        if self.agree is not None and not self.agree([*groups.values()]):
            apart: dict[tuple[Any, ...], list[int]] = defaultdict(list)
            for number in self._live:
                request = self._requests[number]
                alone = () if request.key in (BACKWARD, PAUSE) else (number,)
                apart[request.key, request.grad, *alone].append(number)
            groups = apart
        for (key, grad, *_), group in groups.items():
            if key == BACKWARD:
                group = self._complete_graphs(group)
            elif grad and key != PAUSE:
                for number in group:
                    self._joined[number].update(group)
            requests = [self._requests.pop(number) for number in group]
            if not requests:
                continue
            try:
                with torch.set_grad_enabled(grad):
                    answers = requests[0].together([request.value for request in requests])
                for request, answer in zip(requests, answers, strict=True):
                    request.answer = answer
            except Exception as error:  # each of the jobs fails with it, as it would alone
                for request in requests:
                    request.error = error

    def _complete_graphs(self, asking: list[int]) -> list[int]:
        """Those of the jobs that ask for a backward pass whose graphs contain only jobs that ask, too, or have left."""
        chosen = set(asking)
        while True:
            short = next((n for n in chosen if not self._joined[n].intersection(self._live) <= chosen), None)
            if short is None:
                break
            chosen.remove(short)
        for number in chosen:
            self._joined[number].clear()
        return sorted(chosen)


@dataclass(frozen=True)
class Seat:
    """The place of a job in a meeting."""

    meeting: Meeting
    number: int
    name: str

    def ask(self, key: Hashable, value: Any, together: Together) -> Any:
        """Wait until all jobs have asked; returns this job's item of what `together` returns for the values of those
        that have asked with the same key and mode of gradients.
        """
        self.meeting._requests[self.number] = request = _Request(key, value, together)
        self.meeting._pass_on()
        self.meeting._wait(self.number)
        if request.error is not None:
            raise request.error
        return request.answer

    def backward(self, loss: Tensor) -> None:
        """One backward pass of all jobs' losses."""
        self.ask(BACKWARD, loss, _backward)


def _backward(losses: list[Tensor]) -> list[None]:
    torch.autograd.backward(losses)
    return [None] * len(losses)


def here() -> Seat | None:
    """The seat of this thread; None outside of meetings."""
    return vars(_thread).get("seat")


def seeds() -> Sequence[int]:
    """The seeds of all jobs of a meeting; empty outside of meetings."""
    seat = here()
    return () if seat is None else seat.meeting.shared["seeds"]


def pause() -> None:
    """Let the other jobs of a meeting go on."""
    seat = here()
    if seat is not None:
        seat.ask(PAUSE, None, list)


def shared(key: Hashable, make: Callable[[], T]) -> T:
    """The result of `make`; in a meeting, it is called for the first job that asks for `key`, and all jobs share it."""
    seat = here()
    if seat is None:
        return make()
    parts = seat.meeting.shared
    if key not in parts:
        parts[key] = make()
    value: T = parts[key]
    return value


@contextmanager
def adapters(rows: Mapping[int, int]) -> Iterator[None]:
    """Within this context, a pass has rows of several adapters of one base: by adapter, how many, in this order. Empty:
    all rows are of the adapter whose module runs.
    """
    global _rows
    before, _rows = _rows, dict(rows)
    try:
        yield
    finally:
        _rows = before


def adapters_now() -> dict[int, int]:
    """The rows of `adapters` in the current pass."""
    return _rows
