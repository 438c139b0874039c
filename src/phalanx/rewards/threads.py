"""Worker threads that no exit waits for.

Daemons of our own, because `ThreadPoolExecutor` waits at interpreter exit for its threads, and a reward that hangs
would then hang the job that its time limit has just ended.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple[Future[Any], Callable[[], Any]]


class DaemonPool:
    """Daemon threads that take calls from one queue; they start with the first call, after any fork."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._queue: queue.SimpleQueue[_Task] | None = None

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call; one thread runs calls in the order in which they came."""
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            for i in range(self._threads):
                threading.Thread(target=_work, args=(self._queue,), name=f"{self._name}-{i}", daemon=True).start()
        future: Future[T] = Future()
        self._queue.put((future, function))
        return future


def _work(tasks: "queue.SimpleQueue[_Task]") -> None:
    while True:
        future, function = tasks.get()
        try:
            result = function()
        except BaseException as error:
            # Whatever a user's reward raises must reach whoever waits: this thread has nobody else to tell.
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del future, function  # no images are kept while the thread waits
