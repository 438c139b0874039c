"""Reward: grade-school maths (GSM8K), the final number of a solution.

`strict` takes the number after the last `####`, `flexible` the last number anywhere. Unlike verl's, it reads the whole
text and compares values: `$18`, `**18**`, `18.0`, `1,018`, `3/4` and `1e3` are read as numbers.
"""

import re
from collections import deque
from fractions import Fraction
from typing import Any, Literal

from phalanx.zoo.rewards.text._answers import marked

LONGEST = 100  # maximum characters of a number
# sign and currency; digits, perhaps with thousands separators, decimals and an exponent; or a fraction
_NUMBER = re.compile(
    r"(?<![\d.,_/])(?P<front>[+-]?[$\u20ac\u00a3]?[+-]?)(?P<number>(?:[1-9]\d{0,2}(?:,\d{3})++(?!\d)|\d++)?(?:\.\d++)?)"
    r"(?<=\d)(?P<exponent>[eE][+-]?\d{1,2}(?!\d))?(?:(?P<top>[ ]\d++)?\s?/\s?(?P<bottom>\d++))?"
    r"(?![\d_]|[eE][+-]?\d|[.,;/^]\d|[,;]\s\d)"
)


class Gsm8k:
    """1 if the number equals the metadata's `ground_truth`, `format_score` for another number, 0 without one."""

    def __init__(self, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0) -> None:
        self.method, self.format_score = method, format_score

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        scores = []
        for completion, meta in zip(completions, metadata, strict=True):
            given = answer(completion, self.method)
            right = given == _truth_of(meta)
            scores.append(1.0 if right else 0.0 if given is None else self.format_score)
        return scores

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        """Raise ValueError for a row without a ground truth that is a number."""
        _truth_of(metadata)

    def answer(self, completion: str) -> str | None:
        """The number of a solution, see GivesAnswers."""
        number = answer(completion, self.method)
        return None if number is None else str(number)


def _truth_of(metadata: dict[str, Any]) -> Fraction:
    """The number in a row's ground truth. Raises ValueError if there is none."""
    if "ground_truth" not in metadata:
        raise ValueError("gsm8k needs a ground_truth for each prompt, a number or a solution that ends with #### 18")
    value = truth(metadata["ground_truth"])
    if value is None:
        raise ValueError(f"gsm8k: the ground_truth {str(metadata['ground_truth'])[-80:]!r} is not a number")
    return value


def answer(text: str, method: str = "strict") -> Fraction | None:
    """The final number of a solution; None if it has none."""
    text = text.replace("\u2212", "-")
    if method == "flexible":
        numbers = deque(_NUMBER.finditer(text), maxlen=1)
        return _exact_value(numbers[0]) if numbers else None
    line = marked(text)
    if line is None:
        return None
    # of an equation, only the result counts; an expression without a result is not a number
    result = _NUMBER.match(line.rpartition("=")[2].lstrip("*_`$\\ "))
    if result is None or re.match(r"\s*[-+*/^x\u00d7]\s*\d", result.string[result.end() :]):
        return None
    return _exact_value(result)


def truth(value: Any) -> Fraction | None:
    """The value of a ground truth: a number, its text, or a solution that ends with `#### 18`; None for others."""
    text = str(value).replace("\u2212", "-")
    if "####" in text:
        return answer(text)
    result = _NUMBER.fullmatch(text.strip().rstrip("."))
    return None if result is None else _exact_value(result)


def _exact_value(result: "re.Match[str]") -> Fraction | None:
    """The exact value of a match of _NUMBER; None if it is too long, or a fraction with denominator 0."""
    if len(result.group()) > LONGEST:
        return None
    number = Fraction(result["number"].replace(",", "") + (result["exponent"] or ""))
    if result["bottom"] is not None:
        if int(result["bottom"]) == 0:
            return None
        top, bottom = result["top"], int(result["bottom"])
        number = number / bottom if top is None else number + Fraction(int(top), bottom)
    return -number if "-" in result["front"] else number
