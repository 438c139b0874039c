"""Verifiers of answers, which run in confined processes: see phalanx.rewards.verifier. To start fast and stay small,
this file does not import phalanx.
"""

import re
from collections.abc import Callable
from functools import cache
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
