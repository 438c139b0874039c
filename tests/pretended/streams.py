"""Streams as vector clocks: nothing runs late, and to rely on what need not have happened yet is a fault.

Work on a stream follows the work that the stream had before, and what the host knew to be done when it gave the work
away. A stream, or the host, learns of another stream's work by waiting for it. Memory remembers its last write, and the
reads since then; an access by someone who does not know of them would be a race.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from tests.pretended.record import RECORD


class Clock:
    """The work of each stream that someone knows to be done."""

    def __init__(self) -> None:
        self.done: dict[Stream, int] = {}

    def knows(self, stream: "Stream", work: int) -> bool:
        return self.done.get(stream, 0) >= work

    def follow(self, other: "Clock") -> None:
        for stream, work in other.done.items():
            if work > self.done.get(stream, 0):
                self.done[stream] = work


HOST = Clock()


class Stream(Clock):
    """As torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__()
        self.debts: dict[Stream, int] = {}  # work of others on memory that was taken for this stream and freed
        self.device, self.priority, self.cuda_stream, self.stream_id = device, priority, id(self), id(self)

    def launch(self) -> int:
        """The number of new work."""
        self.follow(HOST)
        for stream, work in self.debts.items():
            if not self.knows(stream, work):
                self.debts = {}
                RECORD.fault(f"{_name(self)} may reuse memory that was freed, and that {_name(stream)} may still use")
        self.debts = {}
        self.done[self] = self.done.get(self, 0) + 1
        return self.done[self]

    def wait_stream(self, other: "Stream") -> None:
        if RECORD.tape is not None and self is not other:
            RECORD.fault("a stream that waits within a graph becomes a part of it")
        self.follow(other)

    def wait_event(self, event: "Event") -> None:
        self.follow(event)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        RECORD.sync("stream.synchronize")
        HOST.follow(self)

    def query(self) -> bool:
        return HOST.knows(self, self.done.get(self, 0))

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> "Stream":
        """As torch.cuda.stream(self)."""
        self._before = current()
        set_current(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_current(self._before)


class Event(Clock):
    """As torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def record(self, stream: Stream | None = None) -> "Event":
        stream = stream or current()
        stream.launch()
        self.done = dict(stream.done)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current()).wait_event(self)

    def synchronize(self) -> None:
        RECORD.sync("event.synchronize")
        HOST.follow(self)

    def query(self) -> bool:
        return all(HOST.knows(stream, work) for stream, work in self.done.items())

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


DEFAULT = Stream()
_threads = threading.local()
_used: set[Stream] = set()


def current(_: Any = None) -> Stream:
    """This thread's stream."""
    stream: Stream = vars(_threads).get("stream", DEFAULT)
    return stream


def set_current(stream: Stream) -> None:
    _threads.stream = stream


@contextlib.contextmanager
def within(stream: Stream | None) -> Iterator[None]:
    """As torch.cuda.stream: work of the block goes to `stream`."""
    before = current()
    set_current(stream or before)
    try:
        yield
    finally:
        set_current(before)


def synchronize(_: Any = None) -> None:
    """As torch.cuda.synchronize: the host waits for all streams."""
    RECORD.sync("cuda.synchronize")
    for stream in _used:
        HOST.follow(stream)


class Memory:
    """The memory of a storage: the device that it would be on, and the work that used it last."""

    def __init__(self, device: torch.device, pinned: bool = False, asked: bool = True) -> None:
        """`asked`: whether the program made it pinned, not `Tensor.to`."""
        self.device, self.pinned, self.asked = device, pinned, asked
        self.owner = current()  # from whose blocks the allocator took it
        self.written: tuple[Stream, int] | None = None
        if device.type == "cuda":  # a block that was freed before, and that its owner's work so far may use
            self.written = self.owner, self.owner.done.get(self.owner, 0)
        self.reads: dict[Stream, int] = {}
        self.kept_for: set[Stream] = set()

    def read(self) -> None:
        """By work on the current stream."""
        stream = current()
        self._check_write(stream, "reads")
        self.reads[stream] = stream.launch()
        _used.add(stream)

    def write(self) -> None:
        """By work on the current stream."""
        stream = current()
        self._check_write(stream, "writes to")
        self._check_reads(stream)
        self.written = stream, stream.launch()
        self.reads.clear()
        _used.add(stream)

    def host_reads(self) -> None:
        self._check_write(HOST, "reads")

    def host_writes(self) -> None:
        self._check_write(HOST, "writes to")
        self._check_reads(HOST)
        self.written = None
        self.reads.clear()

    def _check_write(self, who: Clock, does: str) -> None:
        if isinstance(who, Stream):
            who.follow(HOST)
        if self.written is not None and not who.knows(*self.written):
            RECORD.fault(f"{_name(who)} {does} memory that {_name(self.written[0])} may not have written yet")

    def _check_reads(self, who: Clock) -> None:
        for stream, work in self.reads.items():
            if not who.knows(stream, work):
                RECORD.fault(f"{_name(who)} writes to memory that {_name(stream)} may not have read yet")

    def freed(self) -> None:
        """The owner's next work may get it: by then, the owner must know that others do not use it any more."""
        if self.device.type != "cuda":
            return  # the host's allocator waits for the streams that copied
        uses = dict(self.reads)
        if self.written is not None:
            uses[self.written[0]] = max(self.written[1], uses.get(self.written[0], 0))
        for stream, work in uses.items():
            if stream is not self.owner and stream not in self.kept_for:
                self.owner.debts[stream] = max(work, self.owner.debts.get(stream, 0))

    def renew(self) -> None:
        """The storage has other memory from now on."""
        self.freed()
        self.__init__(self.device, self.pinned, self.asked)  # type: ignore[misc]

    def __del__(self) -> None:
        self.freed()


def _name(who: Clock) -> str:
    if who is HOST:
        return "the host"
    return "the default stream" if who is DEFAULT else "a side stream"
