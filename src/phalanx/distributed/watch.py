"""A thread beside each rank's own: it hears signals, knows which ranks live, and ends this one with the first error.

The main thread is often inside a collective, where it can do none of that. Ranks talk over a connection of their own
to the job's store, which rank 0 keeps; all that is said is small, and repeated every `interval` seconds:

- `beat/<rank>`: a number that grows, the rank's sign of life;
- `error`: the first error of the world. Whoever fails tells it before its connections close, and the others end with
  it, instead of with what a lost connection looks like from their side;
- `stacks`: how often someone asked for all stacks (SIGUSR1).
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch.distributed as dist

from phalanx.ending import end, say

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 3.0  # for a word of other ranks, where this one is about to end

current: "Watch | None" = None  # of the world that this process has joined


class Watch:
    """The watch of one rank. `stop` is the signal that asked it to stop, None before.

    `hosts` names each rank's machine; `local_ranks` are those of this one's launcher, which ends them all where one
    dies; `store` is None where there is nobody to talk to. `second`, another connection to it, is for the main thread:
    the first one may be blocked by then.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        local_ranks: range,
        timeout_s: float,
        store: dist.Store | None = None,
        second: dist.Store | None = None,
    ) -> None:
        self.rank, self.hosts, self.local_ranks, self.timeout_s = rank, hosts, local_ranks, timeout_s
        self.interval = max(min(2.0, timeout_s / 10), len(hosts) / 100)  # one store hears all ranks
        self.stop: signal.Signals | None = None
        self._store = store
        self._second = second
        self._beat = 0
        self._seen: list[tuple[bytes, float]] = []  # each rank's last beat, and when it was new
        self._contact = time.monotonic()
        self._stacks = 0
        self._has_read = False
        self._closed, self._ending = threading.Event(), threading.RLock()
        self._started = False
        self._wakeup, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        if store is not None:
            store.set(f"beat/{rank}", "0")

    # -- the main thread's side -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch; every rank must have been made by then."""
        self._started = True
        self._seen = [(b"0", time.monotonic())] * len(self.hosts)
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        if self._store is not None:  # by itself: a store that is gone may keep it for ever
            threading.Thread(target=self._beats, args=(self._store,), name="beat", daemon=True).start()

    def listen(self) -> None:
        """From now on SIGTERM and SIGINT set `stop`, and SIGUSR1 prints the stacks of all ranks."""
        faulthandler.unregister(signal.SIGUSR1)  # or it would not see the handler that it is to chain to
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)  # the byte that Python writes for it wakes the watch at once
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_deaf)  # a reward's worker process, say, is no rank
        if not self._started:
            self.start()

    def close(self) -> None:
        """The job is done: what peers do from now on is no failure."""
        self._closed.set()
        self._bounded(lambda store: store.set(f"done/{self.rank}", "1"))

    def tell(self, error: str) -> tuple[str, bool]:
        """Report this rank's error. Returns the world's first one, and whether it is this one."""
        self._closed.set()
        self._ending.acquire()  # of the main thread and the watch, the first one ends the process

        def ask(store: dist.Store) -> tuple[str, bool]:
            first = store.add("told", 1) == 1
            if first:
                store.set("error", error)
            return (error if first else self._read(store)), first

        return self._bounded(ask) or (error, True)

    def linger(self, gone: int = 0) -> None:
        """On rank 0, before it ends with an error: the store ends with it, so the others are given time to read.

        `gone` of them are known not to live.
        """
        if self.rank == 0 and self._store is not None:
            readers = len(self.hosts) - 1 - gone + self._has_read
            deadline = time.monotonic() + 2.5 * self.interval
            while time.monotonic() < deadline and (self._bounded(lambda store: store.add("read", 0)) or 0) < readers:
                time.sleep(0.05)

    def explain(self) -> str | None:
        """Why a collective failed here: the first error of another rank, or the ranks that are lost.

        None where all live and none has failed: then one of them hangs, and all ranks print their stacks.
        """
        deadline = time.monotonic() + max(PATIENCE_S, 3.5 * self.interval)
        while time.monotonic() < deadline:
            error = self._bounded(lambda store: self._read(store) if store.check(["error"]) else "")
            if error:
                return error
            lost = self._lost(3 * self.interval)
            if lost is not None:
                return lost
            time.sleep(0.1)
        self._bounded(lambda store: store.add("stacks", 1))
        time.sleep(1.5 * self.interval)
        return None

    def _read(self, store: dist.Store) -> str:
        """The world's first error; rank 0 waits for all to have read it."""
        error = store.get("error").decode()
        if not self._has_read:
            self._has_read = True
            store.add("read", 1)
        return error

    def _bounded(self, ask: Callable[[dist.Store], T]) -> T | None:
        """What `ask` answers of the store; None where that is not reached within PATIENCE_S."""
        store, answers = self._second, list[T]()
        if store is None:
            return None

        def work() -> None:
            with contextlib.suppress(dist.DistError):  # its host is gone
                answers.append(ask(store))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        return answers[0] if answers else None

    # -- the watch's side -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._wakeup], [], [], self.interval)
            for number in self._wakeup.recv(64) if ready else b"":
                self._hear(number)
            lost = self._lost(self.timeout_s)
            if lost is not None and not self._closed.is_set():
                self._end(lost)

    def _beats(self, store: dist.Store) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(dist.DistError):  # `_lost` sees how long that lasts
                self._exchange(store)
            time.sleep(self.interval)

    def _exchange(self, store: dist.Store) -> None:
        """Give and take signs of life."""
        self._beat += 1
        store.set(f"beat/{self.rank}", str(self._beat))
        beats = store.multi_get([f"beat/{rank}" for rank in range(len(self.hosts))])
        self._contact = now = time.monotonic()
        self._seen = [old if beat == old[0] else (beat, now) for beat, old in zip(beats, self._seen, strict=True)]
        if store.check(["error"]) and not self._closed.is_set():
            self._leave(self._read(store))
        asked = store.add("stacks", 0)
        if asked > self._stacks:
            self._stacks = asked
            say(f"stacks of {self._name(self.rank)}:")
            faulthandler.dump_traceback(all_threads=True)

    def _hear(self, number: int) -> None:
        if number == signal.SIGUSR1 and self._store is not None:
            self._stacks += 1  # its own are printed already
            self._bounded(lambda store: store.add("stacks", 1))
        elif number in STOP_SIGNALS:
            self.stop = signal.Signals(number)
            if self._store is not None and not self._closed.is_set():
                self._end_if_alone()

    def _end_if_alone(self) -> None:
        """A launcher says SIGTERM as well where one of its ranks has died: then there is no step to finish."""
        missing, deadline = list(self.local_ranks), time.monotonic() + PATIENCE_S
        self._bounded(lambda store: store.set(f"stop/{self.rank}", "1"))

        def look(store: dist.Store) -> tuple[str | None, list[int]]:
            error = self._read(store) if store.check(["error"]) else None
            return error, [r for r in missing if not (store.check([f"stop/{r}"]) or store.check([f"done/{r}"]))]

        while missing and time.monotonic() < deadline:
            error, missing = self._bounded(look) or (None, [0])  # rank 0 keeps the store
            if error is not None:
                self._leave(error)
            time.sleep(0.05)
        if missing:
            self._end(
                f"{self._names(missing)} ended without a word: killed, out of memory, or crashed", gone=len(missing)
            )

    def _lost(self, silence: float) -> str | None:
        """Who has given no sign of life for `silence` seconds."""
        now = time.monotonic()
        if self._store is None:
            return None
        if now - self._contact > silence:
            return f"lost {self._name(0)}, which keeps the store: no contact for {now - self._contact:.0f} s"
        silent = {rank: self._contact - since for rank, (_, since) in enumerate(self._seen)}
        longest = max(silent.values())
        if longest <= silence:
            return None
        gone = [rank for rank, seconds in silent.items() if seconds > min(silence, 3 * self.interval)]
        return f"lost {self._names(gone)}: no sign of life for {longest:.0f} s"

    def _end(self, error: str, gone: int = 0) -> NoReturn:
        """Report an error that the watch has found, and end this process."""
        error, first = self.tell(error)
        if first:
            say(error)
        self._leave(error, gone)

    def _leave(self, error: str, gone: int = 0) -> NoReturn:
        """End this process, quietly, with the world's first error as the report."""
        self._ending.acquire()
        self.linger(gone)
        end(1 if self.stop is None else 128 + self.stop, error, None)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}"

    def _names(self, ranks: Sequence[int]) -> str:
        hosts = dict.fromkeys(self.hosts[rank] for rank in ranks)
        on = {host: [rank for rank in ranks if self.hosts[rank] == host] for host in hosts}
        return ", ".join(
            f"rank{'s' * (len(those) > 1)} {', '.join(map(str, those))} on {host}" for host, those in on.items()
        )


def _deaf() -> None:
    """In a forked child: signals do again what they do everywhere, and are not told to the rank's watch."""
    signal.set_wakeup_fd(-1)
    faulthandler.unregister(signal.SIGUSR1)
    for number in (*STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
