"""Run a verifier in a confined process, with a time limit of S seconds per question: `python -P _child.py NAME S`.

The first line of its output is a JSON list of the layers of confinement that this machine lacks. It then reads one
question per line, the JSON list of the verifier's arguments, and answers each with one line: [verdict, problem, whether
the row of the data is the problem]. An alarm ends the process if a verifier takes too long. To start fast and stay
small, it does not import phalanx.
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
    """The row of the data cannot be judged, regardless of the answer."""


def load_math() -> Callable[[str, str], bool]:
    """Equivalence of an answer and the truth, both in LaTeX, according to math-verify. The letter i is the imaginary
    unit, which math-verify takes for a variable; solutions of inequalities may be sets or relations.
    """
    import logging
    from dataclasses import replace

    import math_verify
    from sympy import Eq, Expr, FiniteSet, I, Intersection, MatrixBase, Union
    from sympy.core.relational import Relational

    logging.disable(logging.WARNING)  # it warns that its own time limits, which use the same signals, are off
    latex = math_verify.LatexExtractionConfig()
    numbers = math_verify.ExprExtractionConfig()
    without_units = replace(latex, normalization_config=replace(latex.normalization_config, units=False))

    def parsed(text: str, config: math_verify.LatexExtractionConfig) -> list[Any]:
        results = []
        for result in math_verify.parse(rf"\boxed{{{text}}}", [config, numbers], parsing_timeout=None):
            if isinstance(result, Expr | FiniteSet | MatrixBase):
                for name in result.free_symbols:
                    result = result.xreplace({name: I}) if name.name == "i" else result
            results.append(united(result, text))
        return results

    def united(result: Any, text: str) -> Any:
        """The set of `x < 1 or x > 2` or `x > 1 and x < 2`."""
        word = re.search(r"(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])", text)
        if word is None or not isinstance(result, FiniteSet) or len(result.free_symbols) != 1:
            return result
        sets = []
        for part in result.args:
            if isinstance(part, Eq) or not isinstance(part, Relational):
                return result
            sets.append(part.as_set())
        return (Union if word.group() == "or" else Intersection)(*sets)

    def verdict(truth: str, answer: str) -> bool:
        # for math-verify a letter at the end is a unit; where a formula's truth has one, it is read as a variable, too
        configs = [latex, without_units] if re.search(r"[\d}] ?[a-z]+\Z", truth) else [latex]
        for config in configs:
            gold, results = parsed(truth, config), parsed(answer, config)
            if math_verify.verify(gold, results, allow_set_relation_comp=True, timeout_seconds=None):
                return True
        return False

    return verdict


def load_pattern() -> Callable[[str, str], bool]:
    """Whether a regular expression matches the whole of a text."""
    return lambda pattern, text: re.fullmatch(pattern, text, re.DOTALL) is not None


def load_last_group() -> Callable[[str, str], str | None]:
    """The first group of a regular expression's last match in a text; "" if the group is not part of the match."""

    def verdict(pattern: str, text: str) -> str | None:
        matches = deque(re.finditer(pattern, text, re.DOTALL), maxlen=1)
        return matches[0].group(1) or "" if matches else None

    return verdict


def load_reasoning_gym() -> Callable[[str, str | None, dict[str, Any]], float]:
    """The score that the task's own verifier gives an answer to `entry`, which the task has generated."""
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
    """Answer questions until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of a library must not be read as answers
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    verdict = VERIFIERS[name]()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)  # the confined process could not write to a log file
    missing = runpy.run_path(str(Path(__file__).parents[2] / "sandbox.py"))["confine"]()
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
            reply = [None, " ".join(f"{type(error).__name__}: {error}".split()), isinstance(error, RowError)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
