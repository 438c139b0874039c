"""Verifiers in a confined process, which its own alarm ends where one takes too long: `python -P _child.py NAME S`.

Its first line is the list of confinements that this machine lacks. It then reads a question per line, the JSON list of
a verifier's arguments, and answers each with a line, [verdict, problem, whether the row of the data is the problem].
Nothing of phalanx is imported, so that it starts fast and stays small.
"""

import json
import os
import re
import runpy
import signal
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


class RowError(Exception):
    """The row of the data cannot be judged, whatever the answer is."""


def load_math() -> Callable[[str, str], bool]:
    """Equivalence of an answer and the truth, both in LaTeX, by math-verify."""
    import logging

    import math_verify

    logging.disable(logging.WARNING)  # it warns that its own limits are off: they are signals, as ours is

    def verdict(truth: str, answer: str) -> bool:
        gold, result = (math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in (truth, answer))
        return bool(math_verify.verify(gold, result, timeout_seconds=None))

    return verdict


def load_pattern() -> Callable[[str, str], bool]:
    """Whether a regular expression matches the whole of a text."""
    return lambda pattern, text: re.fullmatch(pattern, text, re.DOTALL) is not None


def load_last_group() -> Callable[[str, str], str | None]:
    """The first group of a regular expression's last match in a text, "" for one without a part in it."""

    def verdict(pattern: str, text: str) -> str | None:
        matches = deque(re.finditer(pattern, text, re.DOTALL), maxlen=1)
        return matches[0].group(1) or "" if matches else None

    return verdict


def load_reasoning_gym() -> Callable[[str, str | None, dict[str, Any]], float]:
    """The score of an answer by the task's own verifier, for the row that the task has made."""
    import reasoning_gym

    known = cache(reasoning_gym.get_score_answer_fn)

    def verdict(task: str, answer: str | None, entry: dict[str, Any]) -> float:
        try:
            score = known(task)
        except ValueError as error:
            raise RowError(str(error)) from error
        return float(score(answer, entry))

    return verdict


VERIFIERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "last_group": load_last_group,
    "math": load_math,
    "pattern": load_pattern,
    "reasoning_gym": load_reasoning_gym,
}


def main(name: str, limit_s: float) -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of a library are no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's
    verdict = VERIFIERS[name]()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)  # a log in a file could not be written to from here on
    missing = runpy.run_path(str(Path(__file__).parents[2] / "sandbox.py"))["confine"]()
    print(json.dumps(missing), file=answers, flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        # Nothing catches these signals: they end what runs in C as well. Time of the processor, so that a busy machine
        # gives the same scores; the clock of the wall only for what sleeps.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_REAL, 10 * limit_s)
        try:
            reply = [verdict(*arguments), None, False]
        except Exception as error:  # whatever a verifier makes of a text
            reply = [None, " ".join(f"{type(error).__name__}: {error}".split()), isinstance(error, RowError)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
