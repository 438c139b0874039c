"""Verifiers with a time limit for each sample, in processes beside the rank.

Not in the reward's thread: what hangs there cannot be ended, a limit by signals works on the main thread alone, and a
regular expression keeps Python's lock for as long as it runs.
"""

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.config.messages import cut
from phalanx.rewards.base import RewardOutput

_CHILD = Path(__file__).with_name("_child.py")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class VerifierError(RuntimeError):
    """A verifier gave no verdict; the message is a part of a line."""


class Verifier:
    """A verifier of _child.py by its name: each thread that asks at a time has a process, which waits for the next."""

    def __init__(self, name: str, timeout_s: float) -> None:
        if not 0 < timeout_s < 3600:
            raise ValueError(f"timeout_s={timeout_s:g} should be seconds, above 0 and below 3600")
        self._name, self._timeout_s = name, timeout_s
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()

    def ask(self, *arguments: Any) -> Any:
        """The verdict. Raises VerifierError where it takes too long, raises, or takes the process with it."""
        try:
            child = self._idle.get_nowait()
        except queue.Empty:
            child = self._start()
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError):  # it is gone: told below
            child.stdin.write(json.dumps(arguments) + "\n")
            child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise VerifierError(self._end(child))
        self._idle.put(child)
        verdict, problem = json.loads(line)
        if problem is not None:
            raise VerifierError(cut(problem))
        return verdict

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-P", str(_CHILD), self._name, str(self._timeout_s)]
        environment = {**os.environ, **_ONE_THREAD}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
        )

    def _end(self, child: "subprocess.Popen[str]") -> str:
        """The end of a process, as a part of a line."""
        code = child.wait()
        assert child.stdin is not None and child.stdout is not None
        child.stdout.close()
        with suppress(BrokenPipeError):  # of the question that it did not hear
            child.stdin.close()
        if code == -signal.SIGALRM:
            return f"no verdict within timeout_s={self._timeout_s:g}"
        return f"its process ended with {code}"


def scored(verdicts: Sequence[float | VerifierError]) -> RewardOutput:
    """Scores of which some may be missing, and why."""
    scores = [float("nan") if isinstance(verdict, VerifierError) else verdict for verdict in verdicts]
    problem = next((str(verdict) for verdict in verdicts if isinstance(verdict, VerifierError)), None)
    return RewardOutput(scores, problem=problem)
