"""Tool: Python code, run in a confined process per call."""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from phalanx.environments.turn import CALL
from phalanx.sandbox import command, environment

_CHILD = Path(__file__).with_name("_child.py")
_LONGEST = 100_000  # maximum characters of code
_MOST_OUTPUT = 2**17  # bytes that are kept; longer observations are truncated anyway
_NO_RANDOMIZE = 0x0040000  # ADDR_NO_RANDOMIZE of personality
Seconds = Annotated[int, Field(ge=1, le=3600)]
Mebibytes = Annotated[int, Field(ge=128, le=2**20)]
_PATIENCE = 5  # seconds of wall-clock time for each second of CPU time


class Python:
    """One tool, which runs a script in a separate process without network, other processes, environment variables, and
    access to files, except for reading Python's own. Its random numbers are those of the sample and the call.

    timeout_s: seconds of CPU time for a script; it may take five times as long by the clock.
    memory_mb: its address space in MiB.
    unconfined: run scripts even if this machine lacks a layer of the confinement.
    """

    def __init__(self, timeout_s: Seconds = 5, memory_mb: Mebibytes = 1024, unconfined: bool = False) -> None:
        self._timeout_s, self._memory, self._unconfined = timeout_s, memory_mb * 2**20, unconfined
        if not unconfined:
            _check_machine()

    def python(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last line. Each call starts afresh.

        Args:
            code: The code of a whole script
        """
        if len(code) > _LONGEST:
            return f"error: the code has {len(code)} characters; at most {_LONGEST} are allowed"
        return self._run_script(code)[0]

    def _run_script(self, code: str) -> tuple[str, list[str]]:
        """The output of a script, and the layers of the confinement that this machine lacks."""
        seed = ascii(CALL.get())
        arguments = [str(self._timeout_s), str(self._memory), "1" if self._unconfined else "0", seed]
        with _same_addresses():
            child = subprocess.Popen(
                command(_CHILD, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment() | {"PYTHONHASHSEED": "0"},
            )
        try:
            assert child.stdin is not None
            with suppress(BrokenPipeError):
                child.stdin.write(code.encode("utf-8", "replace"))
                child.stdin.close()
            output, problem = self._read_output(child)
        finally:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        head, _, text = output.decode("utf-8", "replace").partition("\n")
        missing = None
        with suppress(ValueError):
            missing = json.loads(head)
        if not isinstance(missing, list):
            *_, last = ["", *output.decode("utf-8", "replace").splitlines()]
            raise RuntimeError(f"the process of the tool python did not start: {last or problem}")
        return text if problem is None else f"{text}\nerror: {problem}".lstrip(), missing

    def _read_output(self, child: "subprocess.Popen[bytes]") -> tuple[bytes, str | None]:
        """The output of the process until it ends or exceeds a limit, and the problem, None for a normal end."""
        assert child.stdout is not None
        output, deadline = b"", time.monotonic() + _PATIENCE * self._timeout_s
        poll = select.poll()
        poll.register(child.stdout, select.POLLIN | select.POLLHUP)
        while len(output) <= _MOST_OUTPUT:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                return output, self._timeout_text
            part = os.read(child.stdout.fileno(), 2**16)
            if part:
                output += part
                continue
            try:
                return output, self._exit_problem(child.wait(deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # it has closed its output, and runs on
                return output, self._timeout_text
        return output[:_MOST_OUTPUT], "it printed too much, and was stopped"

    @property
    def _timeout_text(self) -> str:
        """One text for both limits, since the load of the machine decides which one a script meets first."""
        return f"it was stopped at its time limit of {self._timeout_s} seconds"

    def _exit_problem(self, code: int) -> str | None:
        """A description of the process's exit; None for status 0."""
        if code >= 0:
            return None if code == 0 else f"it ended with status {code}"
        if code in (-signal.SIGKILL, -signal.SIGXCPU):
            return self._timeout_text
        return f"its process was ended by {signal.Signals(-code).name}"


@contextmanager
def _same_addresses() -> Iterator[None]:
    """Processes that this thread starts have the same addresses each time, which `print(object())` shows, if the
    machine permits that; containers may not.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    libc = ctypes.CDLL(None)
    before = libc.personality(-1)  # of this thread
    libc.personality(before | _NO_RANDOMIZE)
    try:
        yield
    finally:
        libc.personality(before)


@cache
def _check_machine() -> None:
    """Raise ValueError if this machine cannot confine a process."""
    _, missing = Python(60, unconfined=True)._run_script("")
    if missing:
        raise ValueError(
            f"this machine has no {' and no '.join(missing)} to confine a model's code with; use another machine, or "
            "give unconfined: true if this one has nothing to protect"
        )
