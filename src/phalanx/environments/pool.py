"""Threads and an event loop for the code of environments, which may be slow, raise or hang.

A call has its time limit from when it begins to run. Nothing can end a thread that hangs in C: it is given up, and
another one takes its place, so that later calls do not wait behind it.
"""

import asyncio
import ctypes
import inspect
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
_ANSWERS_S = 1.0  # in which an event loop that is not blocked answers


@dataclass(frozen=True)
class Outcome:
    """The end of a call: its value, or the error that it raised, or that it ran too long."""

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


class Loop:
    """An event loop on a daemon thread of its own, which starts with the first coroutine, after any fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def give_up(self) -> None:
        """End the thread where it is, if it runs Python."""
        if self._thread is not None and self._thread.ident is not None:
            _raise_in(self._thread.ident)

    def stop(self) -> None:
        """End the thread once the callbacks that are ready have run."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)


class Pool:
    """The threads of a rank, and the event loop for its async functions."""

    def __init__(self, threads: int, timeout_s: float) -> None:
        self._threads, self._timeout_s = threads, timeout_s
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0  # threads, with those that were given up
        self._wanted = 0  # threads that are not given up
        self._directing = Loop("environments")  # only awaits, so that nothing of a user's blocks it
        self._async = Loop("environments-async")

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine of ours, which awaits calls by `call`."""
        return self._directing.submit(coroutine)

    async def call(self, function: Callable[[], Any], convert: Callable[[Any], Any] = lambda value: value) -> Outcome:
        """Call a function, on a thread, or, if it is async, on the event loop, and `convert` its result there."""

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
        """Let the threads end that are idle, or once they are."""
        with self._lock:
            for _ in range(self._wanted):
                self._queue.put(None)
            self._wanted = 0
        self._async.stop()
        self._directing.stop()

    async def _call_on_thread(self, function: Callable[[], Any]) -> Outcome:
        call = _Call(function)
        with self._lock:
            while self._wanted < self._threads:
                self._start_thread()
        self._queue.put(call)
        await asyncio.wrap_future(call.began)
        ended = asyncio.wrap_future(call.ended)
        await asyncio.wait({ended}, timeout=self._timeout_s)
        if not ended.done() and self._gives_up(call):
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
        if not ended.done():
            ended.cancel()
            await self._replace_if_blocked(loop)
            return Outcome(overdue=True, seconds=self._timeout_s)
        if ended.cancelled():
            return Outcome(error=asyncio.CancelledError("it was cancelled"))
        return ended.result()

    async def _replace_if_blocked(self, loop: Loop) -> None:
        """Start another event loop where this one does not answer, since an async function does not let others run."""

        async def answer() -> None: ...

        if loop is not self._async:
            return
        answered = asyncio.wrap_future(loop.submit(answer()))
        await asyncio.wait({answered}, timeout=_ANSWERS_S)
        if not answered.done() and loop is self._async:
            self._async = Loop("environments-async")
            loop.give_up()

    def _start_thread(self) -> None:
        self._started += 1
        self._wanted += 1
        threading.Thread(target=self._work, name=f"environments-{self._started}", daemon=True).start()

    def _gives_up(self, call: _Call) -> bool:
        """Give a call up that runs too long; False where it has ended meanwhile."""
        with self._lock:
            if call.ended.done():
                return False
            call.lost = True
            self._wanted -= 1
            self._start_thread()
            _raise_in(call.thread)
        return True

    def _work(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                return
            call.thread = threading.get_ident()
            call.began.set_result(None)
            start = time.perf_counter()
            try:
                value, failure = call.function(), None
            except BaseException as error:  # whatever the user's code raises, or the end of a thread that is given up
                value, failure = None, error
            with self._lock:
                if call.lost:
                    return
                call.ended.set_result(Outcome(value, failure, seconds=time.perf_counter() - start))
            del call, value, failure  # nothing is kept while the thread waits


def _raise_in(thread: int) -> None:
    """Raise SystemExit in a thread where it runs Python: a loop there would take turns with the decoding for good."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
