"""The store of a job that goes on in place, on a machine without ranks: `python -m phalanx.run.keep_store PORT`.

Nodes with STORE_ADDR=<this machine>:PORT meet there instead of at node 0, so that no node's loss ends the job. The
command ends with the job, and with its exit status.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.exit import say

END_S = 5.0  # for nodes that wait for a place to learn that the job has ended, and for its last ranks


@contextlib.contextmanager
def serving(port: int) -> Iterator[Any]:
    """A block in which this process keeps a job's store, a dist.Store for keys of phalanx.run.in_place; once the job
    has ended, the block waits for nodes without a place to learn it. Exits with one line if it cannot listen.
    """
    from torch.distributed import DistError, PrefixStore, TCPStore

    from phalanx.run.rendezvous import in_words

    try:
        store = PrefixStore("in_place", TCPStore("localhost", port, is_master=True, wait_for_workers=False))
    except DistError as error:
        say(f"error: {in_words(error)}")
        sys.exit(1)
    try:
        yield store
    finally:
        deadline = time.monotonic() + END_S
        while store.check(["ended"]) and store.add("waits", 0) > 0 and time.monotonic() < deadline:
            time.sleep(0.05)


def main(argv: Sequence[str]) -> int:
    """Keep the store until the job has ended; returns its exit status."""
    if len(argv) != 1 or not argv[0].isdigit():
        say(f"error: {' '.join(argv) or 'no port'}: expected a port, such as python -m phalanx.run.keep_store 29500")
        return 2
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with serving(int(argv[0])) as store:
        say(f"keeping the store of a job at port {argv[0]} until it ends")
        while not store.check(["ended"]):
            time.sleep(0.5)
        time.sleep(END_S)
        return int(store.get("ended"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
