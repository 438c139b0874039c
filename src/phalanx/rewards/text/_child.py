"""Verifiers in a process of their own, which its own alarm ends where one takes too long: `python -P _child.py NAME S`.

It reads a question a line, the JSON list of a verifier's arguments, and answers each with a line, [verdict, problem].
Nothing of phalanx is imported, so that it starts fast and stays small.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

MEMORY = 4 * 2**30  # bytes of a process: 9^(9^9) must not take those of the machine


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


def load_reasoning_gym() -> Callable[[str, str | None, dict[str, Any]], float]:
    """The score of an answer by the task's own verifier, for the row that the task has made."""
    import reasoning_gym

    known = cache(reasoning_gym.get_score_answer_fn)
    return lambda task, answer, entry: float(known(task)(answer, entry))


VERIFIERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "math": load_math,
    "pattern": load_pattern,
    "reasoning_gym": load_reasoning_gym,
}


def main(name: str, limit_s: float) -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    verdict = VERIFIERS[name]()
    for line in sys.stdin:
        arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, limit_s)  # nothing catches it: it ends what runs in C as well
        try:
            reply = [verdict(*arguments), None]
        except Exception as error:  # whatever a verifier makes of a text
            reply = [None, " ".join(f"{type(error).__name__}: {error}".split())]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
