"""How ranks, and nodes before them, come together: each registers in the job's store, so that whoever waits can say how
many have come and which are missing. Ranks that come twice, and worlds of two sizes, are seen there as well.
"""

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from phalanx.config import ConfigError
from phalanx.distributed.launch import Launch
from phalanx.exit import place_of, rank, say

SAY_S = 20.0  # of waiting, until that is said; again after twice the time
MOST = 400  # characters of an error
CONNECT_S = 60  # to a port that answers
LINGER_S = 10.0  # for others to read an error, most of whom look once per second
SIZES = {"rank": "WORLD_SIZE", "node": "NNODES"}
NUMBERS = {"rank": "RANK", "node": "NODE_RANK"}


def place() -> str:
    """This process, as others are told of it."""
    return f"{socket.gethostname()}, process {os.getpid()}"


def register(store: dist.Store, kind: str, number: int, size: int) -> None:
    """Come to the store as `rank` or `node` (`kind`) of this number among `size`; ConfigError where that is not so."""
    here = place()
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
    """The numbers that have not come yet."""
    return [number for number in range(size) if not store.check([f"{kind}/{number}"])]


def waiting(kind: str, size: int, absent: list[int], seconds: float) -> str:
    """The message about a wait."""
    shown = ", ".join(map(str, absent[:16])) + (", …" if len(absent) > 16 else "")
    return f"{size - len(absent)} of {size} {kind}s came within {seconds:.0f} s; {kind}s that are missing: {shown}"


@contextmanager
def joining() -> Iterator[None]:
    """Raise what torch says while ranks join as ConfigError, one line with its cause."""
    try:
        yield
    except RuntimeError as error:  # dist.DistError is one
        raise ConfigError(f"{place_of(rank())} cannot join the other ranks: {in_words(error)}") from error


def meet(launch: Launch, limit: timedelta) -> dist.Store:
    """The job's store, at MASTER_ADDR, once all ranks have come to it.

    Rank 0 says which ones are missing. ConfigError, one line, where they do not come within `limit`, or where one of
    them is no part of this world.
    """
    store = _connected(launch, limit)
    if _is_launchers() and (launch.max_restarts or launch.nodes):
        return store  # it may hold the ranks of an earlier start
    at = dist.PrefixStore("meet", store)
    at.add("came", 1)
    try:
        register(at, "rank", launch.rank, launch.world_size)
    except ConfigError as error:
        at.set("end", str(error))  # nobody waits for this rank
        _linger(at, launch)
        raise
    if at.add("count", 1) == launch.world_size:
        at.set("end", "")
    begin, told = time.monotonic(), SAY_S
    while not at.check(["end"]):
        waited = time.monotonic() - begin
        if launch.rank == 0 and waited > min(told, limit.total_seconds()):
            line = waiting("rank", launch.world_size, missing(at, "rank", launch.world_size), waited)
            if waited > limit.total_seconds():
                at.set("end", line)
            else:
                say(line)
                told *= 2
        time.sleep(min(1.0, 0.01 + waited / 10))
    problem = at.get("end").decode()
    if problem:
        _linger(at, launch)
        raise ConfigError(problem)
    return store


def _linger(at: dist.Store, launch: Launch) -> None:
    """This rank knows why it ends; on rank 0 wait until all that came do, since the store may end with it."""
    at.add("read", 1)
    deadline = time.monotonic() + LINGER_S
    while launch.rank == 0 and at.add("read", 0) < at.add("came", 0) and time.monotonic() < deadline:
        time.sleep(0.05)


def _is_launchers() -> bool:
    """Whether torchrun keeps the store, instead of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connected(launch: Launch, limit: timedelta) -> dist.Store:
    """A connection to the store, which rank 0 makes unless torchrun has done so."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise ConfigError("RANK is set, but MASTER_ADDR and MASTER_PORT, where rank 0 is reached, are not both set")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    where = f"MASTER_ADDR={address}, MASTER_PORT={port}"
    serves = launch.rank == 0 and not _is_launchers()
    begin, told = time.monotonic(), SAY_S
    while not serves and (problem := unreachable(address, port)) is not None:
        waited = time.monotonic() - begin
        if waited > limit.total_seconds():
            raise ConfigError(f"rank 0 ({where}) was not reached within {waited:.0f} s: {problem}")
        if launch.local_rank == 0 and waited > told:
            say(f"{place_of(launch.rank)} waits for rank 0 ({where}), for {waited:.0f} s so far: {problem}")
            told *= 2
        time.sleep(min(1.0, 0.05 + waited / 10))
    try:
        store = dist.TCPStore(
            address,
            port,
            launch.world_size,
            is_master=serves,
            timeout=timedelta(seconds=CONNECT_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise ConfigError(f"{place_of(launch.rank)} has no store at {where}: {in_words(error)}") from error
    store.set_timeout(limit)
    return store


def unreachable(address: str, port: int) -> str | None:
    """Why nobody answers there, in words; None where somebody does."""
    try:
        socket.create_connection((address, port), timeout=3).close()
    except socket.gaierror as error:
        return f"the name cannot be resolved ({error.strerror})"
    except OSError as error:
        return error.strerror or str(error)
    return None


def in_words(error: BaseException) -> str:
    """The cause of an error of torch's, in one line."""
    text = " ".join(str(error).split())
    if "EADDRINUSE" in text:
        port = re.search(r"port: (\d+)", text)
        return (
            f"port {port[1] if port else ''} of {socket.gethostname()} is in use, by another job or a second first node"
        )
    return text[:MOST] or type(error).__name__
