"""Run a verifier in a confined process, with a time limit of S seconds per question: `python -P _verifier.py NAME S`.
NAME is one of VERIFIERS, or `file.py:NAME` for what the function `load_NAME` of that file returns.

The first line of its output is a JSON list of the layers of confinement that this machine lacks. It then reads one
question per line, the JSON list of the verifier's arguments, and answers each with one line: [verdict, problem, whether
the row of the data is the problem, which a verifier says by an exception named RowError]. An alarm ends the process if
a verifier takes too long. To start fast and stay small, it does not import phalanx.
"""

import json
import os
import re
import runpy
import signal
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_pattern() -> Callable[[str, str], bool]:
    """Whether a regular expression matches the whole of a text."""
    return lambda pattern, text: re.fullmatch(pattern, text, re.DOTALL) is not None


def load_last_group() -> Callable[[str, str], str | None]:
    """The first group of a regular expression's last match in a text; "" if the group is not part of the match."""

    def verdict(pattern: str, text: str) -> str | None:
        matches = deque(re.finditer(pattern, text, re.DOTALL), maxlen=1)
        return matches[0].group(1) or "" if matches else None

    return verdict


VERIFIERS: dict[str, Callable[[], Callable[..., Any]]] = {"last_group": load_last_group, "pattern": load_pattern}


def main(name: str, limit_s: float) -> None:
    """Answer questions until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of a library must not be read as answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    file, _, name = name.rpartition(":")
    verdict = (runpy.run_path(file)[f"load_{name}"] if file else VERIFIERS[name])()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)  # the confined process could not write to a log file
    missing = runpy.run_path(str(Path(__file__).parents[1] / "sandbox.py"))["confine"]()
    print(json.dumps(missing), file=answers, flush=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        # No handler catches these signals, so they also end code that runs in C. The limit is CPU time, so that scores
        # do not depend on the machine's load; the limit of wall-clock time is for code that sleeps.
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_REAL, 10 * limit_s)
        try:
            reply = [verdict(*arguments), None, False]
        except Exception as error:  # a verifier may raise anything for some text
            reply = [None, " ".join(f"{type(error).__name__}: {error}".split()), type(error).__name__ == "RowError"]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
