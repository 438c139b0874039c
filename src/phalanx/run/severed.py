"""Close the connections between ranks, so that a collective that waits for a lost rank fails at once.

gloo's groups cannot be aborted, and a connection to a host that has vanished stays open. Here the sockets are shut down
below gloo, which then raises the error of a lost peer in whichever thread waits. Linux only.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

LISTENS = "0A"  # a state in /proc/net/tcp
_aborting = threading.Lock()
unlisted: list[Any] = []  # process groups that torch.distributed does not list, those across roles


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    inodes, ports = {inode for _, inode in _sockets()}, set[int]()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # no IPv6
            for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENS and words[9] in inodes:
                    ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


def sever(ports: Iterable[int]) -> None:
    """Shut down this process's connections that one of the ranks accepted, which listen on these ports, and abort
    NCCL's groups.
    """
    ports = set(ports)
    for fd, _ in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
            if (
                copy.family in (socket.AF_INET, socket.AF_INET6)
                and {
                    copy.getsockname()[1],
                    copy.getpeername()[1],  # OSError for one that listens
                }
                & ports
            ):
                copy.shutdown(socket.SHUT_RDWR)
    if torch.cuda.is_available():
        with _aborting:  # the watch severs, and then the main thread, which sees the result
            for group in unlisted:
                group.abort()
            if dist.is_initialized():
                distributed_c10d._abort_process_group()


def _sockets() -> Iterator[tuple[int, str]]:
    """The file descriptors and inodes of this process's sockets."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            kind, _, inode = os.readlink(entry).partition(":")
            if kind == "socket":
                yield int(entry.name), inode.strip("[]")
