"""A lock that allows only one job at a time to use an output_dir, across machines.

Two jobs would overwrite each other's checkpoints and mix their metrics. Rank 0 locks the file `.lock`, which the kernel
unlocks when the process dies. Since some shared file systems do not show locks to other machines, `running.json` also
names the job, with a counter that it increments every BEAT_S seconds: a counter that does not change is a dead job's.
"""

import errno
import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from phalanx.config.inside import append_inside
from phalanx.config.messages import cut
from phalanx.distributed.collectives import from_first
from phalanx.distributed.mesh import World
from phalanx.exit import say
from phalanx.models.meeting import here
from phalanx.run import in_place
from phalanx.run.telemetry.run_folder import BEAT_S, RUNNING_FILE, STOP_FILE, read_json, write_json

PATIENCE_S = 10.0  # seconds without a new beat after which a job on another machine is considered dead
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems without locks

_held: "dict[Path, FolderLock]" = {}  # one per job of this process


def hold(folder: Path, world: World) -> None:
    """Lock the folder for this job until `release` or the end of rank 0; all ranks call this together.

    Raises ValueError if another job uses the folder, or if it cannot be written.
    """

    def take() -> None:
        if here() is None:
            release()
        try:
            job = in_place.remembered("folder lock", lambda: secrets.token_hex(8))
            _held[folder] = FolderLock(folder, world.watch.fail, world.watch.ask, job)
        except ValueError as error:
            raise ValueError(f"trainer.output_dir: {error}") from error
        except OSError as error:
            raise unwritable(folder, error) from error

    from_first(take)


def unwritable(folder: Path, error: OSError) -> ValueError:
    """The user's mistake if something cannot be made or written in the folder of a run."""
    reason = "something else has this name" if isinstance(error, FileExistsError) else error.strerror or error
    return ValueError(f"trainer.output_dir: '{cut(str(error.filename or folder))}' cannot be made or written: {reason}")


def release(folder: Path | None = None) -> None:
    """Unlock the folder of a job; None: of all jobs of this process."""
    for each in list(_held) if folder is None else [folder]:
        if each in _held:
            _held.pop(each).release()


class FolderLock:
    """The lock of a folder.

    lost: called once, with a message, if another job takes the folder. stop: called once if `phalanx stop` asks this
    job to stop. job: of this job, whose ranks take the lock over from one that is frozen and was left behind. Raises
    ValueError if another job uses the folder, OSError if it cannot be written.
    """

    def __init__(self, folder: Path, lost: Callable[[str], object], stop: Callable[[], object], job: str = "") -> None:
        self.folder, self._lost, self._stop, self._job = folder, lost, stop, job or secrets.token_hex(8)
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = append_inside(folder, ".lock")
        try:
            self._locked = self._try_lock()
            other = read_json(self.folder, RUNNING_FILE)
            # on this machine, holding the lock proves that the other job is dead
            dead = other is None or (self._locked and other.get("machine") == _machine_name())
            if other is not None and not dead and other.get("job") != self._job:
                self._wait_for_silence(other)
        except BaseException:
            self._lock.close()
            raise
        self._me: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            "machine": _machine_name(),
            "token": secrets.token_hex(8),
            "job": self._job,
            "beat": 0,
        }
        self._write_state()
        self._done, self._stop_called = threading.Event(), False
        self._thread = threading.Thread(target=self._send_beats, name="folder lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop the beats and unlock the folder."""
        self._done.set()
        self._thread.join(PATIENCE_S)  # otherwise a beat could recreate the file after it was removed
        other = read_json(self.folder, RUNNING_FILE)
        if other is not None and other.get("token") == self._me["token"]:
            for name in (RUNNING_FILE, STOP_FILE):
                with suppress(OSError):  # it does not exist, or is a folder
                    (self.folder / name).unlink()
        self._lock.close()

    def _try_lock(self) -> bool:
        """Lock the file; False if the file system has no locks, or while a frozen rank of this job holds the lock.
        Raises ValueError if another job does.
        """
        try:
            # a lockf lock belongs to the process, so a reward function's forked child does not keep it
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            other = read_json(self.folder, RUNNING_FILE) or {}
            if other.get("job") == self._job:
                return False
            raise ValueError(self._in_use(other)) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return False
        return True

    def _wait_for_silence(self, other: dict[str, Any]) -> None:
        """Wait PATIENCE_S for a beat of the other job; ValueError if it is alive."""
        say(f"{self.folder} was left by {_describe_job(other)}; checking for {PATIENCE_S:.0f} s whether it still runs")
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            time.sleep(BEAT_S / 4)
            now = read_json(self.folder, RUNNING_FILE)
            if now is None:  # it has just ended
                return
            if now != other:
                raise ValueError(self._in_use(now))

    def _send_beats(self) -> None:
        while not self._done.wait(BEAT_S):
            other = read_json(self.folder, RUNNING_FILE)
            if other is not None and other.get("token") != self._me["token"]:
                self._lost(f"trainer.output_dir: {self._in_use(other)}")
                return
            # a request has the token of the start that it is for, so that an old one does not stop the next start
            if not self._stop_called and (read_json(self.folder, STOP_FILE) or {}).get("token") == self._me["token"]:
                self._stop_called = True
                self._stop()
            with suppress(ValueError):
                self._locked = self._locked or self._try_lock()
            self._me["beat"] += 1
            self._write_state()

    def _in_use(self, other: dict[str, Any]) -> str:
        return (
            f"{self.folder} is in use by another job, {_describe_job(other)}; "
            "stop that job first, or choose another trainer.output_dir"
        )

    def _write_state(self) -> None:
        try:
            write_json(self.folder, RUNNING_FILE, self._me)
        except OSError:
            if self._me["beat"] == 0:
                raise
            # a disk that is full for a while must not end the job


def _describe_job(job: dict[str, Any]) -> str:
    return f"process {job.get('pid', '?')} on {job.get('host', '?')}, since {job.get('since', '?')}"


def _machine_name() -> str:
    """A name of this machine that differs from that of other machines with the same host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
