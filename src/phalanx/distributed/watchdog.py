"""A thread beside each rank's own: it hears signals, knows which ranks live, and can end this one.

The main thread is often inside a collective, where it can do none of that: Python runs no signal handler before the
call returns, and a collective does not return while a peer is missing. Without a watch the first word of a dead rank
would be a timeout ten minutes later, on every rank but that one, or "connection closed by peer" from whoever happened
to talk to it.

torchrun covers a part of this. It polls its ranks every 0.1 s; once one has ended with an error it sends SIGTERM to the
others of its node, SIGKILL after a grace period, and prints the failure that was written first to
TORCHELASTIC_ERROR_FILE. It knows neither ranks that hang nor the cause of an error, and other nodes learn of a failure
only as their own collectives fail.

Watches talk over separate connections to the job's store; all messages are small, and repeated every `interval`
seconds:

- `beat/<rank>`: a number that grows, the rank's sign of life;
- `error`: the first error of the world. A rank that fails writes it before its connections close, and the others end
  with it instead of with what a lost connection looks like from their side;
- `told`, `read`: how many ranks have reported an error, and how many have read the first one;
- `stop/<rank>`, `done/<rank>`: the rank was told to stop, or has finished;
- `stop`: the signal by which all ranks are to stop, where they have roles;
- `stacks`: how many times all stacks were asked for (SIGUSR1).
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

from phalanx.exit import REQUEST, end, say

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 3.0  # for an answer of the store or a word from other ranks, when about to end

current: "Watch | None" = None  # of the world that this process has joined


class Watch:
    """The watch of one rank. `stop` is the signal that asked it to stop, None before.

    A rank without a sign of life for `silence_s` seconds is lost. `hosts` names each rank's machine; `local_ranks` are
    those of the same launcher, which ends all of them if one dies. `store` is for the signs of life, None where there
    is nobody to talk to; `second`, another connection to it, is for all else, as a call on the first may be blocked by
    a dead host.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        local_ranks: range,
        silence_s: float,
        store: dist.Store | None = None,
        second: dist.Store | None = None,
        *,
        spreads: bool = False,
    ) -> None:
        """`spreads`: a signal to one rank stops all, which have no collective in which they would agree on it."""
        self.rank, self.hosts = rank, hosts
        self.local_ranks, self.silence_s = local_ranks, silence_s
        # One store serves all ranks, and each reads the beats of all: 1000 ranks beat every 10 s.
        self.interval = max(min(2.0, silence_s / 10), len(hosts) / 100)
        self.stop: signal.Signals | None = None
        self._store = store
        self._second = second
        self._spreads = spreads
        self._beat = 0
        self._seen: list[tuple[bytes, float]] = []  # each rank's last beat, and when it was new
        self._contact = time.monotonic()  # with the store
        self._stacks = 0  # requests for stacks that are answered already
        self._has_read = False  # the world's first error
        # From `close` or `tell` on, silent or ending peers are no reason to act.
        self._closed = threading.Event()
        # Held, and never released, by the thread that ends this process: an RLock, since that thread passes here more
        # than once.
        self._ending = threading.RLock()
        self._started = False
        # Python writes a byte to `_alarm` for each signal, even while the main thread is in C++.
        self._wakeup, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        if store is not None:
            store.set(f"beat/{rank}", "0")  # reading all beats would wait for one that is not there

    # -- the main thread's side --------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch; the watches of all ranks must have been made by then."""
        self._started = True
        self._seen = [(b"0", time.monotonic())] * len(self.hosts)
        threading.Thread(target=self._run, name="watch", daemon=True).start()
        if self._store is not None:
            # A second thread: a call to a store whose host is gone may never return, and the other thread has to
            # notice that.
            threading.Thread(target=self._beats, args=(self._store,), name="beat", daemon=True).start()

    def listen(self) -> None:
        """Let SIGTERM and SIGINT set `stop`, and SIGUSR1 print the stacks of all ranks."""
        # cli has registered it already, and it would go on to chain to the handler of that time
        faulthandler.unregister(signal.SIGUSR1)
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            # Nothing to do here, in the main thread, which may be stuck. A handler must be there all the same: without
            # one the signal ends the process, and writes no byte for the watch.
            signal.signal(number, lambda *_: None)
        faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_deaf)  # a reward's worker process, say, is not a rank
        if not self._started:
            self.start()

    def ask(self) -> None:
        """Stop the job at its next step's end, as a signal to all ranks would; only this rank has to be asked."""
        self.stop = REQUEST
        if self._spreads:
            self._bounded(lambda store: store.set("stop", str(int(REQUEST))))

    def close(self) -> None:
        """Mark the job as done: what peers do from now on is not a failure."""
        self._closed.set()
        self._bounded(lambda store: store.set(f"done/{self.rank}", "1"))

    def tell(self, error: str) -> tuple[str, bool]:
        """Report this rank's error; returns the world's first one, and True if it is this one."""
        self._closed.set()
        self._ending.acquire()  # of the main thread and the watch, the first one ends the process

        def ask(store: dist.Store) -> tuple[str, bool]:
            # add is atomic on the server, so exactly one rank is first
            first = store.add("told", 1) == 1
            if first:
                store.set("error", error)
            return (error if first else self._read(store)), first

        return self._bounded(ask) or (error, True)

    def linger(self, gone: int = 0) -> None:
        """Give the others time to read the first error, before rank 0 ends and the store with it.

        `gone` of them are known to be dead.
        """
        if self.rank != 0 or self._store is None:
            return
        readers = len(self.hosts) - 1 - gone + self._has_read  # rank 0 counts itself if it has read
        deadline = time.monotonic() + 2.5 * self.interval  # each looks once per interval
        while time.monotonic() < deadline:
            have_read = self._bounded(lambda store: store.add("read", 0)) or 0
            if have_read >= readers:
                return
            time.sleep(0.05)

    def explain(self) -> str | None:
        """The cause of a failed collective: the first error of another rank, or the ranks that are lost.

        None if all ranks live and none has failed: then one hangs, and all ranks print their stacks.
        """
        # A rank that dies takes its connections with it at once, while its error takes a moment to be written, and its
        # silence three intervals to be noticed, by a look that comes once an interval, at beats up to one old.
        deadline = time.monotonic() + max(PATIENCE_S, 5.5 * self.interval)
        while time.monotonic() < deadline:
            error = self._bounded(self._read_if_any)
            if error:
                return error
            lost = self._lost(3 * self.interval)
            if lost is not None:
                return lost
            time.sleep(0.1)
        self._bounded(lambda store: store.add("stacks", 1))
        time.sleep(1.5 * self.interval)  # every rank sees the request with its next beat
        return None

    def _read_if_any(self, store: dist.Store) -> str | None:
        """The world's first error, None while there is none."""
        return self._read(store) if store.check(["error"]) else None

    def _read(self, store: dist.Store) -> str:
        """The world's first error; rank 0 waits until all ranks have read it."""
        # `told` is counted before `error` is written: get waits for that moment
        error = store.get("error").decode()
        if not self._has_read:
            self._has_read = True
            store.add("read", 1)
        return error

    def _bounded(self, ask: Callable[[dist.Store], T]) -> T | None:
        """The result of `ask(store)`; None if the store does not answer within PATIENCE_S."""
        store, answers = self._second, list[T]()
        if store is None:
            return None

        def work() -> None:
            with contextlib.suppress(dist.DistError):  # its host is gone
                answers.append(ask(store))

        # The store's own timeout does not cover a host that vanished: its connection stays open, in silence. A thread
        # that waits there can be left behind, as the process is about to end.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        return answers[0] if answers else None

    # -- the watch's side --------------------------------------------------------------------------

    def _run(self) -> None:
        poller = select.poll()  # select() knows no more than 1,024 open files, of which many ranks take more
        poller.register(self._wakeup, select.POLLIN)
        while True:
            # sleep until the next look at the others, or until a signal's byte comes
            for number in self._wakeup.recv(64) if poller.poll(1000 * self.interval) else b"":
                self._hear(number)
            lost = self._lost(self.silence_s)
            if lost is not None and not self._closed.is_set():
                self.fail(lost)

    def _beats(self, store: dist.Store) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(dist.DistError):  # `_lost` sees how long that goes on
                self._exchange(store)
            time.sleep(self.interval)

    def _exchange(self, store: dist.Store) -> None:
        """Exchange signs of life; end with the world's first error; answer a request for stacks."""
        self._beat += 1
        store.set(f"beat/{self.rank}", str(self._beat))
        beats = store.multi_get([f"beat/{rank}" for rank in range(len(self.hosts))])
        # Beats carry no time, and are timed where they are read: clocks of nodes need not agree.
        self._contact = now = time.monotonic()
        for rank, beat in enumerate(beats):
            if beat != self._seen[rank][0]:
                self._seen[rank] = beat, now
        if store.check(["error"]) and not self._closed.is_set():
            self._leave(self._read(store))
        if self._spreads and self.stop is None and store.check(["stop"]):
            self.stop = signal.Signals(int(store.get("stop")))
        asked = store.add("stacks", 0)
        if asked > self._stacks:
            self._stacks = asked
            say(f"stacks of {self._names([self.rank])}:")
            faulthandler.dump_traceback(all_threads=True)

    def _hear(self, number: int) -> None:
        if number == signal.SIGUSR1 and self._store is not None:
            self._stacks += 1  # faulthandler has printed its own already
            self._bounded(lambda store: store.add("stacks", 1))
        elif number in STOP_SIGNALS:
            self.stop = signal.Signals(number)
            if self._store is not None and not self._closed.is_set():
                self._end_if_alone()
                if self._spreads:
                    self._bounded(lambda store: store.set("stop", str(number)))

    def _end_if_alone(self) -> None:
        """On SIGTERM, end now if a rank of this launcher has died: there is no step left to finish.

        torchrun sends the same SIGTERM when the job is to stop in good order and when one of its ranks has failed. In
        the first case all its ranks hear it and say so here, in the second the one that died does not; if it was
        killed, it has left no error either.
        """
        missing = list(self.local_ranks)
        deadline = time.monotonic() + PATIENCE_S
        self._bounded(lambda store: store.set(f"stop/{self.rank}", "1"))

        def look(store: dist.Store) -> tuple[str | None, list[int]]:
            error = self._read_if_any(store)
            silent = [rank for rank in missing if not (store.check([f"stop/{rank}"]) or store.check([f"done/{rank}"]))]
            return error, silent

        while missing and time.monotonic() < deadline:
            # no answer: the store went with rank 0, which keeps it
            error, missing = self._bounded(look) or (None, [0])
            if error is not None:
                self._leave(error)
            time.sleep(0.05)
        if missing:
            error = f"{self._names(missing)} ended without a word: killed, out of memory, or crashed"
            self.fail(error, gone=len(missing))

    def _lost(self, silence: float) -> str | None:
        """The ranks without a sign of life for `silence` seconds, in words; None where all live."""
        now = time.monotonic()
        if self._store is None:
            return None
        if now - self._contact > silence:
            return f"lost {self._names([0])}, which keeps the store: no contact for {now - self._contact:.0f} s"
        # as of the last look at the store: without contact there is no news of anybody
        silent = {rank: self._contact - since for rank, (_, since) in enumerate(self._seen)}
        longest = max(silent.values())
        if longest <= silence:
            return None
        # Ranks that die together, as a node loses power, were last heard at different moments: once the first of them
        # passes the limit, all that have missed three beats are named.
        limit = min(silence, 3 * self.interval)
        gone = [rank for rank, seconds in silent.items() if seconds > limit]
        return f"lost {self._names(gone)}: no sign of life for {longest:.0f} s"

    def fail(self, error: str, gone: int = 0) -> NoReturn:
        """Report an error that a thread beside the main one has found, and end this process."""
        error, first = self.tell(error)
        if first:
            say(error)
        self._leave(error, gone)

    def _leave(self, error: str, gone: int = 0) -> NoReturn:
        """End this process, quietly, with the world's first error as its report."""
        # Where the main thread is ending the process already, this thread waits here until it does.
        self._ending.acquire()
        self.linger(gone)
        # end() leaves by os._exit: the main thread, stuck in a collective, would never see an exception
        end(1 if self.stop is None else 128 + self.stop, error, None)

    def _names(self, ranks: Sequence[int]) -> str:
        """`ranks 0, 1 on a, rank 3 on b`."""
        on: dict[str, list[int]] = {}
        for rank in ranks:
            on.setdefault(self.hosts[rank], []).append(rank)
        parts = []
        for host, numbers in on.items():
            parts.append(f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} on {host}")
        return ", ".join(parts)


def _deaf() -> None:
    """Give signals their usual meaning again in a forked child, unheard by the rank's watch."""
    signal.set_wakeup_fd(-1)
    faulthandler.unregister(signal.SIGUSR1)
    for number in (*STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
