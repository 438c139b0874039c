"""Rendezvous of nodes and ranks: each registers in the job's store, so that those that wait can report how many have
arrived and which are missing. Duplicate ranks and inconsistent world sizes are detected there as well.
"""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from phalanx.config.messages import ConfigError
from phalanx.distributed.launch_env import Launch
from phalanx.exit import in_place, place_of, rank, say

SAY_S = 20.0  # of waiting before the first message about it; each further one comes after twice the time
MOST = 400  # characters of an error
CONNECT_S = 60  # to connect to a port that answers
LINGER_S = 10.0  # for other ranks to read an error; they look at least once per second
SIZES = {"rank": "WORLD_SIZE", "node": "NNODES"}
NUMBERS = {"rank": "RANK", "node": "NODE_RANK"}


def register(store: dist.Store, kind: str, number: int, size: int) -> None:
    """Register in the store as the `rank` or `node` (`kind`) with this number among `size`.

    Raises ConfigError if another one has the same number or registered a different size.
    """
    here = f"{socket.gethostname()}, process {os.getpid()}"
    first = store.compare_set(f"{kind}s", "", f"{size} by {here}").decode()
    expected, _, by = first.partition(" by ")
    if expected != str(size):
        name = SIZES[kind]
        raise ConfigError(f"{name} is {size} on {kind} {number} ({here}) and {expected} on {by}; expected one number")
    before = store.compare_set(f"{kind}/{number}", "", here).decode()
    if before != here:
        raise ConfigError(
            f"{kind} {number} came twice, from {before} and from {here}; expected one {NUMBERS[kind]} each"
        )


def missing(store: dist.Store, kind: str, size: int) -> list[int]:
    """Numbers of the ranks or nodes that have not registered yet."""
    return [number for number in range(size) if not store.check([f"{kind}/{number}"])]


def waiting(kind: str, size: int, absent: list[int], seconds: float) -> str:
    """The message about a wait for missing ranks or nodes."""
    shown = ", ".join(map(str, absent[:16])) + (", …" if len(absent) > 16 else "")
    return f"{size - len(absent)} of {size} {kind}s came within {seconds:.0f} s; {kind}s that are missing: {shown}"


@contextmanager
def joining() -> Iterator[None]:
    """Within the block, turn torch's errors into a ConfigError of one line with their cause."""
    try:
        yield
    except RuntimeError as error:  # dist.DistError is one
        if in_place():  # a rank that was lost since is no mistake
            raise
        raise ConfigError(f"{place_of(rank())} cannot join the other ranks: {in_words(error)}") from error


def meet(launch: Launch, limit: timedelta) -> dist.Store:
    """Connect to the job's store at MASTER_ADDR, and wait until all ranks have registered there. A rank alone has a
    store in its process.

    Rank 0 prints which ones are missing. Raises ConfigError, with one line, if they do not all register within `limit`,
    or if one of them does not fit this world.
    """
    if launch.alone:
        return dist.HashStore()
    store = connect_store(launch, limit)
    if _is_launchers() and (launch.max_restarts or launch.nodes):
        return store  # it may contain the ranks of an earlier start
    at = dist.PrefixStore("meet", store)
    at.add("came", 1)
    try:
        register(at, "rank", launch.rank, launch.world_size)
    except ConfigError as error:
        at.set("end", str(error))  # no rank needs to wait for this one
        _wait_readers(at, launch)
        raise
    if at.add("count", 1) == launch.world_size:
        at.set("end", "")
    begin, next_message_s = time.monotonic(), SAY_S
    while not at.check(["end"]):
        waited = time.monotonic() - begin
        if launch.rank == 0 and waited > min(next_message_s, limit.total_seconds()):
            line = waiting("rank", launch.world_size, missing(at, "rank", launch.world_size), waited)
            if waited > limit.total_seconds():
                at.set("end", line)
            else:
                say(line)
                next_message_s *= 2
        time.sleep(min(1.0, 0.01 + waited / 10))
    problem = at.get("end").decode()
    if problem:
        _wait_readers(at, launch)
        raise ConfigError(problem)
    return store


def _wait_readers(at: dist.Store, launch: Launch) -> None:
    """Count this rank as one that has read the error. Rank 0, which may keep the store, waits for the others."""
    at.add("read", 1)
    deadline = time.monotonic() + LINGER_S
    while launch.rank == 0 and at.add("read", 0) < at.add("came", 0) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_launchers() -> bool:
    """Whether torchrun runs the store instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(launch: Launch, limit: timedelta) -> dist.Store:
    """Connect to the store, which rank 0 creates unless torchrun has done so. Raises ConfigError after `limit`."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ConfigError("RANK is set, but MASTER_ADDR and MASTER_PORT, the address of rank 0, are not both set")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    where = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    serves = launch.rank == 0 and not _is_launchers()
    begin, next_message_s = time.monotonic(), SAY_S
    while not serves and (problem := unreachable(address, port)) is not None:
        waited = time.monotonic() - begin
        if waited > limit.total_seconds():
            raise ConfigError(f"rank 0 ({where}) was not reached within {waited:.0f} s: {problem}")
        if launch.local_rank == 0 and waited > next_message_s:
            say(f"{place_of(launch.rank)} waits for rank 0 ({where}), for {waited:.0f} s so far: {problem}")
            next_message_s *= 2
        time.sleep(min(1.0, 0.05 + waited / 10))
    try:
        store = dist.TCPStore(
            address,
            port,
            launch.world_size,
            is_master=serves,
            timeout=min(limit, timedelta(seconds=CONNECT_S)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise ConfigError(f"{place_of(launch.rank)} cannot open the store at {where}: {in_words(error)}") from error
    store.set_timeout(limit)
    return store


def unreachable(address: str, port: int) -> str | None:
    """Why a connection to the address fails, in words; None if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=3).close()
    except socket.gaierror as error:
        return f"the name cannot be resolved ({error.strerror})"
    except OSError as error:
        return error.strerror or str(error)
    return None


def in_words(error: BaseException) -> str:
    """The cause of one of torch's errors, as one line."""
    text = " ".join(str(error).split())
    if "EADDRINUSE" in text:
        port = re.search(r"port: (\d+)", text)
        return (
            f"port {port[1] if port else ''} of {socket.gethostname()} is in use, by another job or a second first node"
        )
    return text[:MOST] or type(error).__name__
