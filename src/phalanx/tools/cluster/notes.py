"""Exchange of notes between ranks in the job's store, which exists before any process group.

A rank that is missing or stuck leaves no note and can be reported, whereas a collective would hang.
"""

import json
import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.config.messages import ConfigError
from phalanx.distributed.launch_env import Launch
from phalanx.run.rendezvous import connect_store
from phalanx.types import JobError

POLL_S = 0.05


def open_store(launch: Launch, timeout_s: float) -> dist.Store:
    """Open the store at MASTER_ADDR:MASTER_PORT, which is torchrun's or, without torchrun, rank 0's. A rank alone has a
    store in its process.

    Raises JobError if it cannot be reached within `timeout_s` seconds.
    """
    if launch.alone:
        return dist.HashStore()
    try:
        store = connect_store(launch, timedelta(seconds=timeout_s))
    except ConfigError as error:
        raise JobError(
            f"{error}; MASTER_ADDR must name the node of rank 0 as all nodes see it, rank 0 must be running there, and "
            "firewalls must let the port through"
        ) from error
    # torchrun's store survives a restart of the ranks and still contains their earlier notes
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"check_cluster/{start}", store)


def master() -> str:
    """The address of the store, for messages."""
    return f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"


class KVExchange:
    """Exchanges JSON values between all ranks, which must call the same methods in the same order."""

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self.rank, self.size, self._store = rank, size, store
        self._turn = 0

    def gather(self, value: Any, limit_s: float) -> dict[int, Any]:
        """Leave a note; returns, on rank 0, the notes by rank that arrived within `limit_s` seconds."""
        self._turn += 1
        keys = [f"{self._turn}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], json.dumps(value))
        if self.rank != 0:
            return {}
        self._wait_keys(keys, limit_s)
        notes = {}
        for rank, key in enumerate(keys):
            if self._store.check([key]):
                notes[rank] = json.loads(self._store.get(key))
        return notes

    def agree(self, value: Any, limit_s: float) -> Any:
        """Return rank 0's value on all ranks; raises JobError if it does not arrive within `limit_s` seconds."""
        self._turn += 1
        key = f"{self._turn}/agreed"
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        try:
            if self._wait_keys([key], limit_s):
                return json.loads(self._store.get(key))
            problem = f"said nothing for {limit_s:g} s"
        except dist.DistError:
            problem = "is gone"
        raise JobError(f"rank 0 {problem}; its own log says why")

    def _wait_keys(self, keys: list[str], limit_s: float) -> bool:
        """Wait for all keys; returns False after the time limit."""
        # not store.wait, which also prints a C++ stack trace
        deadline = time.monotonic() + limit_s
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True
