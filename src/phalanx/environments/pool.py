"""Threads and an event loop for the code of environments, which may be slow, raise or hang.

The time limit of a call starts when the call begins to run. A thread that hangs in C cannot be ended: it is abandoned
and replaced by another one, so that later calls do not wait for it.
"""

import asyncio
import ctypes
import inspect
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
_ANSWERS_S = 1.0  # seconds within which an event loop that is not blocked responds


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call: its value, or the exception that it raised, or `overdue` if it ran too long."""

    value: Any = None
    error: BaseException | None = None
    overdue: bool = False
    seconds: float = 0.0


@dataclass
class _Call:
    """A call in the queue of the threads."""

    function: Callable[[], Any]
    began: Future[None] = field(default_factory=Future)
    ended: Future[Outcome] = field(default_factory=Future)
    thread: int = 0
    lost: bool = False


class Blocked(SystemExit):
    """Raised in a coroutine that blocks its event loop, to end it."""


class Loop:
    """An event loop on a separate daemon thread, which the first coroutine starts, hence after any fork."""

    def __init__(self, name: str) -> None:
        self.freed: asyncio.Task[bool] | None = None  # on the pool's directing loop, while this one is being unblocked
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run_forever, args=[self._loop], name=self._name, daemon=True
                )
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def interrupt(self) -> str:
        """End the running callback, once it executes Python code. Returns its file and line, as a part of a message."""
        assert self._thread is not None and self._thread.ident is not None, "a coroutine has begun"
        frame = sys._current_frames().get(self._thread.ident)
        _raise_in(self._thread.ident, Blocked)
        return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"

    def _run_forever(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                loop.run_forever()
            except Blocked:  # from the callback that was interrupted; other coroutines continue
                continue
            return

    def stop(self) -> None:
        """End the thread after the callbacks that are ready."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)


class Pool:
    """The threads of a rank for environments, and the event loop for their async functions."""

    def __init__(self, threads: int, timeout_s: float) -> None:
        self._threads, self._timeout_s = threads, timeout_s
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0  # threads, including those that were abandoned
        self._alive = 0  # threads that were not abandoned
        self._directing = Loop("environments")  # only awaits, so that no user code can block it
        self._async = Loop("environments-async")

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of this package, which runs user code only through `call`."""
        return self._directing.submit(coroutine)

    async def call(self, function: Callable[[], Any], convert: Callable[[Any], Any] = lambda value: value) -> Outcome:
        """Call a function on a thread or, if it is async, on the event loop, and apply `convert` to its result there.

        A function that is not async itself may also return a coroutine.
        """

        def run() -> Any:
            value = function()
            return value if inspect.iscoroutine(value) else convert(value)

        if inspect.iscoroutinefunction(inspect.unwrap(function)):
            return await self._call_async(function(), convert)
        outcome = await self._call_on_thread(run)
        if inspect.iscoroutine(outcome.value):
            return await self._call_async(outcome.value, convert)
        return outcome

    def close(self) -> None:
        """End the threads once they are idle."""
        with self._lock:
            for _ in range(self._alive):
                self._queue.put(None)
            self._alive = 0
        self._async.stop()
        self._directing.stop()

    async def _call_on_thread(self, function: Callable[[], Any]) -> Outcome:
        call = _Call(function)
        with self._lock:
            while self._alive < self._threads:
                self._start_thread()
        self._queue.put(call)
        await asyncio.wrap_future(call.began)
        ended = asyncio.wrap_future(call.ended)
        await asyncio.wait({ended}, timeout=self._timeout_s)
        if not ended.done() and self._abandon_call(call):
            return Outcome(overdue=True, seconds=self._timeout_s)
        return await ended

    async def _call_async(self, coroutine: Coroutine[Any, Any, Any], convert: Callable[[Any], Any]) -> Outcome:
        async def run() -> Outcome:
            start = time.perf_counter()
            try:
                return Outcome(convert(await coroutine), seconds=time.perf_counter() - start)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # whatever the user's code raises; SystemExit would end the loop
                return Outcome(error=error, seconds=time.perf_counter() - start)

        loop = self._async
        ended = asyncio.wrap_future(loop.submit(run()))
        await asyncio.wait({ended}, timeout=self._timeout_s)
        if not ended.done() and await self._unblock_loop(loop):
            # another coroutine may have delayed this one, so its time limit restarts
            await asyncio.wait({ended}, timeout=self._timeout_s)
        if not ended.done() or (not ended.cancelled() and isinstance(ended.result().error, Blocked)):
            ended.cancel()
            return Outcome(overdue=True, seconds=self._timeout_s)
        if ended.cancelled():
            return Outcome(error=asyncio.CancelledError("it was cancelled"))
        return ended.result()

    async def _unblock_loop(self, loop: Loop) -> bool:
        """Interrupt an async function that blocks the event loop. Returns whether the loop was blocked and responds
        again; a loop that still does not respond is replaced.
        """
        if loop.freed is None:
            loop.freed = asyncio.ensure_future(self._interrupt_loop(loop))
        freed = loop.freed
        answers = await freed
        loop.freed = None
        return answers

    async def _interrupt_loop(self, loop: Loop) -> bool:
        if await _is_responsive(loop):
            return False
        place = loop.interrupt()
        answers = await _is_responsive(loop, _ANSWERS_S / 2)
        log.warning(
            "environment: an async function%s blocked the event loop of all samples of this rank for %g seconds and "
            "was interrupted%s; expected await, or asyncio.to_thread for blocking calls",
            place,
            self._timeout_s,
            "" if answers else ", but still blocks it: the samples that wait on that loop end",
        )
        if not answers and loop is self._async:
            self._async = Loop("environments-async")
        return answers

    def _start_thread(self) -> None:
        self._started += 1
        self._alive += 1
        threading.Thread(target=self._run_calls, name=f"environments-{self._started}", daemon=True).start()

    def _abandon_call(self, call: _Call) -> bool:
        """Abandon a call that runs too long, and its thread; False if it has ended in the meantime."""
        with self._lock:
            if call.ended.done():
                return False
            call.lost = True
            self._alive -= 1
            self._start_thread()
            _raise_in(call.thread)
        return True

    def _run_calls(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                return
            call.thread = threading.get_ident()
            call.began.set_result(None)
            start = time.perf_counter()
            try:
                value, failure = call.function(), None
            except BaseException as error:  # whatever the user's code raises, or SystemExit in an abandoned thread
                value, failure = None, error
            with self._lock:
                if call.lost:
                    return
                call.ended.set_result(Outcome(value, failure, seconds=time.perf_counter() - start))
            del call, value, failure  # so that nothing is kept alive while the thread waits


async def _is_responsive(loop: Loop, seconds: float = _ANSWERS_S) -> bool:
    """Whether an event loop responds within some seconds."""

    async def answer() -> None: ...

    answered = asyncio.wrap_future(loop.submit(answer()))
    await asyncio.wait({answered}, timeout=seconds)
    return answered.done()


def _raise_in(thread: int, error: type[SystemExit] = SystemExit) -> None:
    """Raise an exception in a thread once it executes Python, as an endless loop would compete for the GIL forever."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
