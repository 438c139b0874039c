"""The watch: a thread on each rank that receives signals, monitors which ranks are alive, and can end the process.

The main thread is often inside a collective, where it can do none of this: Python runs signal handlers only after the
call returns, and a collective does not return while a peer is missing. Without a watch, the first sign of a dead rank
would be a timeout on all other ranks ten minutes later, or "connection closed by peer" on a rank that happened to
communicate with it.

torchrun does only a part of this. It polls its ranks every 0.1 s. If one has ended with an error, it sends SIGTERM to
the others on its node, and SIGKILL after a grace period, and prints the failure that was written first to
TORCHELASTIC_ERROR_FILE. It detects neither hanging ranks nor the cause of an error, and other nodes notice a failure
only when their collectives fail.

Watches communicate over separate connections to the job's store. All messages are small, and they are repeated every
`interval` seconds:

- `beat/<rank>`: a growing number, the rank's heartbeat;
- `error`: the first error of the world. A failing rank writes it before its connections close, so that the others end
  with this error and not with one about a lost connection;
- `told`, `read`: number of ranks that have reported an error, and number of ranks that have read the first one;
- `stop/<rank>`, `done/<rank>`: the rank was told to stop, or has finished;
- `stop`: the signal by which all ranks shall stop;
- `stacks`: number of requests for the stacks of all ranks (SIGUSR1).
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

import torch
import torch.distributed as dist

from phalanx.exit import REQUEST, end, in_place, say, told_to_stop
from phalanx.models.meeting import here

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOLD_S = 1.0  # for the launcher to note that it was told to stop, since its ranks may receive the signal earlier
PATIENCE_S = 3.0  # to wait for the store or for other ranks when about to end

current: "Watch | None" = None  # the watch of the world that this process has joined


class Watch:
    """The watch of one rank. `stop` is the signal that asked it to stop; None before that.

    hosts: the machine of each rank, for messages. local_ranks: the ranks of the same launcher, which ends all of them
    if one dies. silence_s: seconds without a heartbeat after which a rank is lost. store: connection for heartbeats;
    None if there is only one rank. second: another connection to the same store for everything else, because a dead
    host may block calls on the first one.
    """

    def __init__(
        self,
        rank: int,
        hosts: Sequence[str],
        local_ranks: range,
        silence_s: float,
        store: dist.Store | None = None,
        second: dist.Store | None = None,
    ) -> None:
        self.rank, self.hosts = rank, hosts
        self.local_ranks, self.silence_s = local_ranks, silence_s
        # One store serves all ranks, and each rank reads all heartbeats, so that 1000 ranks send one every 10 s.
        self.interval = max(min(2.0, silence_s / 10), len(hosts) / 100)
        self.stop: signal.Signals | None = None
        self._store = store
        self._second = second
        self._beat = 0
        self._seen: list[tuple[bytes, float]] = []  # each rank's last heartbeat, and when it was first read
        self._contact = time.monotonic()  # the last contact with the store
        self._stacks = 0  # requests for stacks that have been answered
        self._has_read = False  # whether this rank has read the world's first error
        # After `close` or `tell`, silent or ending peers are ignored.
        self._closed = threading.Event()
        # Acquired and never released by the thread that ends this process; an RLock, because that thread may acquire it
        # more than once.
        self._ending = threading.RLock()
        self._started = False
        self.sever: Callable[[], None] | None = None  # closes the connections to other ranks
        self.patient = False  # the main thread knows of the loss
        self.severed = False  # from lost ranks, and the main thread may not know
        # Python writes a byte to `_alarm` for each signal, even while the main thread runs C++ code.
        self._wakeup, self._alarm = socket.socketpair()
        self._alarm.setblocking(False)
        if store is not None:
            store.set(f"beat/{rank}", "0")  # reading all heartbeats would wait for a missing one

    # -- the main thread's side --------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads. The watches of all ranks must have been created by then."""
        self._started = True
        self._seen = [(b"0", time.monotonic())] * len(self.hosts)
        threading.Thread(target=self._run_thread, name="watch", daemon=True).start()
        if self._store is not None:
            # a second thread, because a call to a store whose host is gone may never return, and the first thread must
            # notice that
            threading.Thread(target=self._send_beats, args=(self._store,), name="beat", daemon=True).start()

    def listen(self) -> None:
        """Make SIGTERM and SIGINT set `stop`, and SIGUSR1 print the stacks of all ranks; Python lets only a process's
        main thread do so, and in another one the process keeps its own handlers.
        """
        if not self._started:
            self.start()
        if threading.current_thread() is not threading.main_thread():
            return
        # cli has registered SIGUSR1 already and would keep chaining to the handler of that time
        faulthandler.unregister(signal.SIGUSR1)
        for number in (*STOP_SIGNALS, signal.SIGUSR1):
            # The handler does nothing, because the main thread that runs it may be stuck. But without a handler, the
            # signal would end the process and write no byte for the watch.
            signal.signal(number, lambda *_: None)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=True)  # a notebook's stderr is no file
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_reset_signals)  # a forked child, such as a reward's worker, is not a rank

    def ask(self) -> None:
        """Stop the job at the end of its next step, like a signal to all ranks. Calling it on one rank is enough."""
        self.stop = REQUEST
        self._ask_store(lambda store: store.set("stop", str(int(REQUEST))))

    def close(self) -> None:
        """Mark the job as done, so that peers that end from now on do not count as failed. If this process has several
        jobs, only the main thread does so, after the last of them.
        """
        if here() is None:
            self._closed.set()
            self._ask_store(lambda store: store.set(f"done/{self.rank}", "1"))

    def retire(self) -> None:
        """End the watch of a world that this process has left."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._alarm.send(b"\0")

    def first_error(self) -> str | None:
        """The world's first error; None if there is none, or if the store does not answer."""
        return self._ask_store(self._read_if_any)

    def silent(self) -> list[int]:
        """The ranks that have missed three heartbeats."""
        limit = 3 * self.interval
        return [rank for rank, (_, since) in enumerate(self._seen) if self._contact - since > limit]

    def goes_on(self, *, wait: bool) -> bool:
        """Whether ranks are lost without which this one goes on. wait: where NCCL's results may be arbitrary before a
        loss is noticed, until it would be.
        """
        if self.sever is None or self._closed.is_set():
            return False
        deadline = time.monotonic() + 5.5 * self.interval * (wait and torch.cuda.is_available())
        while not self.severed and self._lost_ranks(3 * self.interval) is None:
            if time.monotonic() >= deadline or self.first_error() is not None:
                return False
            time.sleep(0.1)
        return True

    def tell(self, error: str) -> tuple[str, bool]:
        """Report this rank's error. Returns the world's first error, and whether it is this one."""
        self._closed.set()
        self._ending.acquire()  # the first of the main thread and the watch to get here ends the process

        def ask(store: dist.Store) -> tuple[str, bool]:
            # add is atomic on the server, so exactly one rank is first
            first = store.add("told", 1) == 1
            if first:
                store.set("error", error)
            return (error if first else self._read_error(store)), first

        return self._ask_store(ask) or (error, True)

    def linger(self, gone: int = 0) -> None:
        """On rank 0, whose end ends the store: wait for the other ranks to read the first error.

        gone: number of ranks that are known to be dead.
        """
        if self.rank != 0 or self._store is None:
            return
        readers = len(self.hosts) - 1 - gone + self._has_read  # rank 0 counts itself if it has read
        deadline = time.monotonic() + 2.5 * self.interval  # each rank looks once per interval
        while time.monotonic() < deadline:
            have_read = self._ask_store(lambda store: store.add("read", 0)) or 0
            if have_read >= readers:
                return
            time.sleep(0.05)

    def explain(self) -> str | None:
        """The cause of a failed collective: the first error of another rank, or the lost ranks.

        Returns None if all ranks are alive and none has failed. Then one of them hangs, and all print their stacks.
        """
        # The connections of a dying rank close at once, but its error takes a moment to be written, and its silence is
        # noticed only after three intervals, plus one between looks and one for the age of its last heartbeat.
        deadline = time.monotonic() + max(PATIENCE_S, 5.5 * self.interval)
        while time.monotonic() < deadline:
            cause = self.first_error() or self._lost_ranks(3 * self.interval)
            if cause is not None:
                return cause
            time.sleep(0.1)
        self._ask_store(lambda store: store.add("stacks", 1))
        time.sleep(1.5 * self.interval)  # every rank sees the request with its next heartbeat
        return None

    def _read_if_any(self, store: dist.Store) -> str | None:
        """The world's first error; None if there is none yet."""
        return self._read_error(store) if store.check(["error"]) else None

    def _read_error(self, store: dist.Store) -> str:
        """The world's first error. Reading it is counted, because rank 0 waits until all ranks have done so."""
        # `told` is incremented before `error` is written, and get waits in between
        error = store.get("error").decode()
        if not self._has_read:
            self._has_read = True
            store.add("read", 1)
        return error

    def _ask_store(self, ask: Callable[[dist.Store], T]) -> T | None:
        """The result of `ask(store)`; None if the store does not answer within PATIENCE_S seconds."""
        store, answers = self._second, list[T]()
        if store is None:
            return None

        def work() -> None:
            with contextlib.suppress(dist.DistError):  # its host is gone
                answers.append(ask(store))

        # The store's timeout does not cover a host that vanished, whose connection stays open but silent. A thread that
        # waits for it can be abandoned, because the process is about to end.
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        return answers[0] if answers else None

    # -- the watch's side --------------------------------------------------------------------------

    def _run_thread(self) -> None:
        poller = select.poll()  # select() supports only file descriptors below 1,024, and a large job has more
        poller.register(self._wakeup, select.POLLIN)
        while not self._closed.is_set():
            before = time.monotonic()
            # sleep until the next look at the other ranks, or until a signal writes a byte
            heard = self._wakeup.recv(64) if poller.poll(1000 * self.interval) else b""
            self._forgive_pause(time.monotonic() - before - self.interval)
            for number in heard:
                self._handle_signal(number)
            lost = self._lost_ranks(self.silence_s)
            if lost is not None and not self._closed.is_set() and not self.patient:
                self._lose(lost)

    def _lose(self, lost: str) -> None:
        """End this process, or, where it can go on without these ranks, the collective in which it waits for them."""
        if self.sever is None or self._contact < time.monotonic() - self.silence_s:
            self.fail(lost)
        self.patient = self.severed = True
        say(lost)
        self.sever()

    def _forgive_pause(self, paused: float) -> None:
        """Do not count the last `paused` seconds as silence of others, because this process did not run (SIGSTOP,
        `docker pause`). The others may have been frozen as well.
        """
        if paused < self.interval:
            return
        if paused > self.silence_s and not self._closed.is_set():
            say(f"{self._rank_names([self.rank])} was frozen for {paused:.0f} s")
        now = time.monotonic()
        self._seen = [(beat, min(now, since + paused)) for beat, since in self._seen]
        self._contact = min(now, self._contact + paused)

    def _send_beats(self, store: dist.Store) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(dist.DistError):  # `_lost_ranks` measures how long this lasts
                self._exchange_beats(store)
            time.sleep(self.interval)

    def _exchange_beats(self, store: dist.Store) -> None:
        """Exchange heartbeats, end the process on the world's first error, and answer a request for stacks."""
        self._beat += 1
        store.set(f"beat/{self.rank}", str(self._beat))
        beats = store.multi_get([f"beat/{rank}" for rank in range(len(self.hosts))])
        # Heartbeats contain no time and are timed by their reader, since the clocks of nodes may differ.
        self._contact = now = time.monotonic()
        for rank, beat in enumerate(beats):
            if beat != self._seen[rank][0]:
                self._seen[rank] = beat, now
        if store.check(["error"]) and not self._closed.is_set():
            self._leave_silently(self._read_error(store))
        if self.stop is None and store.check(["stop"]):
            self.stop = signal.Signals(int(store.get("stop")))
        asked = store.add("stacks", 0)
        if asked > self._stacks:
            self._stacks = asked
            say(f"stacks of {self._rank_names([self.rank])}:")
            faulthandler.dump_traceback(all_threads=True)

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGUSR1 and self._store is not None:
            self._stacks += 1  # faulthandler has printed its own already
            self._ask_store(lambda store: store.add("stacks", 1))
        elif number in STOP_SIGNALS:
            if in_place() and number == signal.SIGTERM and not told_to_stop(TOLD_S):
                end(128 + number)  # the launcher ends the ranks of a node that has lost one, and no others
            self.stop = signal.Signals(number)
            if self._store is not None and not self._closed.is_set():
                self._ask_store(lambda store: store.set("stop", str(number)))
                self._end_if_alone()

    def _end_if_alone(self) -> None:
        """On SIGTERM, end now if a rank of this launcher is dead or frozen: the current step cannot be finished then.

        torchrun sends the same SIGTERM to stop the job in good order and after one of its ranks has failed. In the
        first case, all its ranks receive it and report that here. In the second case, the dead rank does not, and its
        heartbeat has stopped; if it was killed, it has not left an error either. A rank with a heartbeat that did not
        receive the signal, which somebody sent only to this one, learns of it from the store.
        """
        missing, beats = list(self.local_ranks), dict[int, bytes]()
        deadline = time.monotonic() + PATIENCE_S + 1.5 * self.interval
        self._ask_store(lambda store: store.set(f"stop/{self.rank}", "1"))

        def look(store: dist.Store) -> tuple[str | None, list[int]]:
            error = self._read_if_any(store)
            silent = []
            for rank, beat in zip(missing, store.multi_get([f"beat/{rank}" for rank in missing]), strict=True):
                alive = beat != beats.setdefault(rank, beat)
                if not (alive or store.check([f"stop/{rank}"]) or store.check([f"done/{rank}"])):
                    silent.append(rank)
            return error, silent

        while missing and time.monotonic() < deadline:
            # without an answer, the store has ended together with rank 0, which runs it
            error, missing = self._ask_store(look) or (None, [0])
            if error is not None:
                self._leave_silently(error)
            time.sleep(0.05)
        if missing:
            error = f"no word from {self._rank_names(missing)}: killed, out of memory, crashed, or frozen"
            self.fail(error, gone=len(missing))

    def _lost_ranks(self, silence: float) -> str | None:
        """Message about the ranks without a heartbeat for `silence` seconds; None if all ranks are alive."""
        now = time.monotonic()
        if self._store is None:
            return None
        if now - self._contact > silence:
            kept = os.environ.get("STORE_ADDR")
            keeper = f"STORE_ADDR={kept}" if kept else self._rank_names([0])
            return f"lost {keeper}, which keeps the store: no contact for {now - self._contact:.0f} s"
        # measured at the last contact with the store, since there is no news of any rank after it
        silent = {rank: self._contact - since for rank, (_, since) in enumerate(self._seen)}
        longest = max(silent.values())
        if longest <= silence:
            return None
        # Ranks that die together, for example when a node loses power, sent their last heartbeats at different times.
        # When the first of them exceeds the limit, all that have missed three heartbeats are named.
        limit = min(silence, 3 * self.interval)
        gone = [rank for rank, seconds in silent.items() if seconds > limit]
        return f"lost {self._rank_names(gone)}: no sign of life for {longest:.0f} s"

    def fail(self, error: str, gone: int = 0) -> NoReturn:
        """Report an error detected outside the main thread, and end this process."""
        error, first = self.tell(error)
        if first:
            say(error)
        self._leave_silently(error, gone)

    def _leave_silently(self, error: str, gone: int = 0) -> NoReturn:
        """End this process without a message, with the world's first error as its report."""
        # if the main thread is already ending the process, this thread waits here until it has done so
        self._ending.acquire()
        self.linger(gone)
        # end() uses os._exit, because the main thread, stuck in a collective, would never see an exception
        end(1 if self.stop is None else 128 + self.stop, error, None)

    def _rank_names(self, ranks: Sequence[int]) -> str:
        """The ranks by machine, such as `ranks 0, 1 on a, rank 3 on b`."""
        on: dict[str, list[int]] = {}
        for rank in ranks:
            on.setdefault(self.hosts[rank], []).append(rank)
        parts = []
        for host, numbers in on.items():
            parts.append(f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} on {host}")
        return ", ".join(parts)


def _reset_signals() -> None:
    """Restore the default handling of signals in a forked child, so that they do not reach the rank's watch."""
    signal.set_wakeup_fd(-1)
    faulthandler.unregister(signal.SIGUSR1)
    for number in (*STOP_SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
