"""One job at a time in an output_dir, wherever the jobs run.

Two would overwrite each other's checkpoints and mix their metrics. `.lock` is locked by rank 0's process, so the kernel
frees it when that dies; but not every shared file system tells other machines of a lock. So `running.json` names the
job and counts up every BEAT_S seconds: a count that stands still is a dead job's.
"""

import errno
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.distributed.collectives import from_first
from phalanx.distributed.mesh import World
from phalanx.exit import say
from phalanx.telemetry.run_folder import BEAT_S, RUNNING_FILE, STOP_FILE, read_json, write_json

PATIENCE_S = 10.0  # without a new beat, for a job of another machine
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a file system that has none

_held: "FolderLock | None" = None  # a process works for one job


def hold(folder: Path, world: World) -> None:
    """Take the folder for this job until `release`, or the end of rank 0; a collective of all ranks.

    Raises ValueError if another job has it, or it cannot be written.
    """

    def take() -> None:
        global _held
        release()
        try:
            _held = FolderLock(folder, world.watch.fail, world.watch.ask)
        except ValueError as error:
            raise ValueError(f"trainer.output_dir: {error}") from error
        except OSError as error:
            raise ValueError(
                f"trainer.output_dir: '{error.filename or folder}' cannot be made or written: {error.strerror or error}"
            ) from error

    from_first(take)


def release() -> None:
    """Leave the folder to the next job."""
    global _held
    if _held is not None:
        _held.release()
        _held = None


class FolderLock:
    """A folder that this process has to itself. `lost` is called, once, with a message where another job takes it, and
    `asked`, once, where `phalanx stop` asks this job to stop.

    Raises ValueError if another job has it, OSError if it cannot be written.
    """

    def __init__(self, folder: Path, lost: Callable[[str], object], asked: Callable[[], object]) -> None:
        self.folder, self._lost, self._asked = folder, lost, asked
        self._file, self._request = folder / RUNNING_FILE, folder / STOP_FILE
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / ".lock").open("w")
        try:
            sure = self._try_lock()
            other = read_json(self._file)
            if other is not None and not (sure and other.get("machine") == _machine()):
                self._wait_for_silence(other)
        except BaseException:
            self._lock.close()
            raise
        self._me: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            "machine": _machine(),
            "token": secrets.token_hex(8),
            "beat": 0,
        }
        self._write()
        self._done, self._stops = threading.Event(), False
        self._thread = threading.Thread(target=self._beats, name="folder lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop the beats and free the folder."""
        self._done.set()
        self._thread.join(PATIENCE_S)  # a beat that is being written would bring the file back
        other = read_json(self._file)
        if other is not None and other.get("token") == self._me["token"]:
            self._file.unlink(missing_ok=True)
            self._request.unlink(missing_ok=True)
        self._lock.close()

    def _try_lock(self) -> bool:
        """Lock the file; False if the file system cannot tell. Raises ValueError if another process has it."""
        try:
            # of the process, so that a reward's forked child does not keep it
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(self._in_use(read_json(self._file) or {})) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
        return True

    def _wait_for_silence(self, other: dict[str, Any]) -> None:
        """Return once the job that is named here has shown no sign of life; raises ValueError if it lives."""
        say(f"{self.folder} was left by {_named(other)}; looking for {PATIENCE_S:.0f} s whether it still runs")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(BEAT_S / 4)
            now = read_json(self._file)
            if now is None:  # it has just ended
                return
            if now != other:
                raise ValueError(self._in_use(now))

    def _beats(self) -> None:
        while not self._done.wait(BEAT_S):
            other = read_json(self._file)
            if other is not None and other.get("token") != self._me["token"]:
                self._lost(f"trainer.output_dir: {self._in_use(other)}")
                return
            # a request names the start that it is for: one that is left over does not stop the next start
            if not self._stops and (read_json(self._request) or {}).get("token") == self._me["token"]:
                self._stops = True
                self._asked()
            self._me["beat"] += 1
            self._write()

    def _in_use(self, other: dict[str, Any]) -> str:
        return (
            f"{self.folder} is in use by another job, {_named(other)}; "
            "stop that one first, or give this one another trainer.output_dir"
        )

    def _write(self) -> None:
        try:
            write_json(self._file, self._me)
        except OSError:
            if self._me["beat"] == 0:
                raise
            # a disk that is full for a while ends no job


def _named(job: dict[str, Any]) -> str:
    return f"process {job.get('pid', '?')} on {job.get('host', '?')}, since {job.get('since', '?')}"


def _machine() -> str:
    """A name of this machine, which differs from that of others with the same host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
