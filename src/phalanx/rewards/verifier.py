"""Verifiers with a time limit per sample, in confined processes beside the rank.

They do not run in the reward's thread because a thread that hangs cannot be ended, time limits by signals work only on
the main thread, and a regular expression holds the GIL while it runs.
"""

import json
import logging
import queue
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from phalanx.config.messages import cut
from phalanx.exit import place
from phalanx.rewards.base import UNJUDGED, RewardOutput
from phalanx.sandbox import command, environment

log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("_verifier.py")


class VerifierError(RuntimeError):
    """A verifier gave no verdict on an answer; the message is a phrase."""


class Verifier:
    """A verifier by name: one of VERIFIERS in _verifier.py, or of another `file`. Each thread that is asking has its
    own process; idle processes are reused.
    """

    extras = (UNJUDGED,)  # extras of the rewards that use a verifier

    def __init__(self, name: str, timeout_s: float, file: Path | None = None) -> None:
        if not 0 < timeout_s < 3600:
            raise ValueError(f"timeout_s={timeout_s:g} should be seconds, above 0 and below 3600")
        self._name, self._timeout_s = name, timeout_s
        self._source = name if file is None else f"{file}:{name}"
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._starts, self._unjudged = count(), count()  # by several threads: `next` is atomic

    def ask(self, *arguments: Any) -> Any:
        """The verdict. Raises VerifierError if the verifier takes too long, raises or ends the process; ValueError if
        the row of the data cannot be judged; RuntimeError if the process does not start.
        """
        question = json.dumps(arguments) + "\n"
        child = self._ready_process()
        assert child.stdin is not None and child.stdout is not None
        with suppress(BrokenPipeError):  # the process has ended, which reading from it shows
            child.stdin.write(question)
            child.stdin.flush()
        line = child.stdout.readline()
        if not line:
            raise VerifierError(self._end_process(child))
        self._idle.put(child)
        verdict, problem, of_row = json.loads(line)
        if problem is None:
            return verdict
        raise ValueError(cut(problem.removeprefix("RowError: "))) if of_row else VerifierError(cut(problem))

    def judge(self, *arguments: Any) -> tuple[float, float]:
        """The verdict as a score, and 0; without a verdict, 0 and 1, because no text of a policy may end the job.
        The first answer without a verdict is logged.
        """
        try:
            return float(self.ask(*arguments)), 0.0
        except VerifierError as error:
            if next(self._unjudged) == 0:
                # at level error, because only rank 0 shows warnings, and this rank may be the only one affected
                log.error(
                    "%s: the verifier %s has no verdict on an answer, which is scored as a wrong one; from here on see "
                    "the reward's metric unjudged; the first: %s",
                    place(),
                    self._name,
                    error,
                )
            return 0.0, 1.0

    def _ready_process(self) -> "subprocess.Popen[str]":
        """A process that is ready for a question: an idle one that is still running, or a new one."""
        with suppress(queue.Empty):
            while True:
                child = self._idle.get_nowait()
                if child.poll() is None:
                    return child
                self._end_process(child)
        child = self._start_process()
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"the verifier {self._name} did not start: {self._end_process(child)}")
        missing = json.loads(line)
        if next(self._starts) == 0 and missing:
            log.warning(
                "this machine has no %s: the verifier %s runs without that confinement; see docs/rewards.md",
                " and no ".join(missing),
                self._name,
            )
        return child

    def _start_process(self) -> "subprocess.Popen[str]":
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        line = command(_CHILD, self._source, str(self._timeout_s))
        return subprocess.Popen(line, text=True, encoding="utf-8", env=environment(), **pipes)

    def _end_process(self, child: "subprocess.Popen[str]") -> str:
        """Wait for a process that ends. Returns the reason for its end, as a phrase."""
        code = child.wait()
        assert child.stdin is not None and child.stdout is not None
        child.stdout.close()
        with suppress(BrokenPipeError):  # closing flushes a question that the process did not read
            child.stdin.close()
        if code in (-signal.SIGALRM, -signal.SIGPROF):
            return f"no verdict within timeout_s={self._timeout_s:g}"
        return f"its process ended with {code}"


def with_unjudged(judged: Sequence[tuple[float, float]]) -> RewardOutput:
    """The results of `Verifier.judge` as scores with the extra `unjudged`."""
    scores, unjudged = (list(values) for values in zip(*judged, strict=True))
    return RewardOutput(scores, {UNJUDGED: unjudged})
