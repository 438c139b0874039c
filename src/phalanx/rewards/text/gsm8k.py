"""Grade-school maths (GSM8K): the answer behind the last `####` of a solution.

`strict` takes the number behind the last `####`, `flexible` the last number at all. Unlike verl's, all text is read,
and numbers are compared as numbers: `$18`, `**18**`, `18.0` and `1,018` are what they say, and so are `3/4` and `1e3`.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

LONGEST = 100  # characters of a number; what is longer is none
# signs and currencies; digits, whose thousands commas may separate, with decimals and an exponent, or a fraction
_NUMBER = re.compile(
    r"(?<![\d.,_/])(?P<front>[+-]?[$\u20ac\u00a3]?[+-]?)(?P<number>(?:[1-9]\d{0,2}(?:,\d{3})++(?!\d)|\d++)?(?:\.\d++)?)"
    r"(?<=\d)(?P<exponent>[eE][+-]?\d{1,2}(?!\d))?(?:(?P<top>[ ]\d++)?\s?/\s?(?P<bottom>\d++))?"
    r"(?![\d_]|[eE][+-]?\d|[.,;/^]\d|[,;]\s\d)"
)


class Gsm8k:
    """1 where the number is that of metadata's `ground_truth`, else 0; `format_score` for a wrong number."""

    def __init__(self, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0) -> None:
        if method not in ("strict", "flexible"):
            raise ValueError(f"method={method!r} should be strict or flexible")
        self.method, self.format_score = method, format_score

    def __call__(
        self, completions: Sequence[str], prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> list[float]:
        scores = []
        for completion, meta in zip(completions, metadata, strict=True):
            given = answer(completion, self.method)
            right = given == _wanted(meta)
            scores.append(1.0 if right else 0.0 if given is None else self.format_score)
        return scores

    def check_row(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Raise ValueError for a row without a ground truth that is a number."""
        _wanted(metadata)

    def answer(self, completion: str) -> str | None:
        """The number of a solution, see GivesAnswers."""
        number = answer(completion, self.method)
        return None if number is None else str(number)


def _wanted(metadata: Mapping[str, Any]) -> Fraction:
    """The number that a row's ground truth gives; ValueError if there is none."""
    if "ground_truth" not in metadata:
        raise ValueError("gsm8k needs a ground_truth for each prompt, a number or a solution that ends in ####")
    wanted = truth(metadata["ground_truth"])
    if wanted is None:
        raise ValueError(f"gsm8k found the ground_truth {str(metadata['ground_truth'])[-80:]!r}, which is no number")
    return wanted


def answer(text: str, method: str = "strict") -> Fraction | None:
    """The number that a solution gives, None without one."""
    text = text.replace("\u2212", "-")
    if method == "flexible":
        numbers = list(_NUMBER.finditer(text))
        return _value(numbers[-1]) if numbers else None
    _, mark, rest = text.rpartition("####")
    if not mark:
        return None
    line = rest.strip().partition("\n")[0]
    # of a sum, only the result counts; without one it is no number
    result = _NUMBER.match(line.rpartition("=")[2].lstrip("*_`$\\ "))
    if result is None or re.match(r"\s*[-+*/^x\u00d7]\s*\d", result.string[result.end() :]):
        return None
    return _value(result)


def truth(value: Any) -> Fraction | None:
    """A ground truth as a number: one, its text, or a solution that ends in `#### 18`."""
    text = str(value).replace("\u2212", "-")
    if "####" in text:
        return answer(text)
    result = _NUMBER.fullmatch(text.strip().rstrip("."))
    return None if result is None else _value(result)


def _value(result: "re.Match[str]") -> Fraction | None:
    """The exact value of a number that was read."""
    if len(result.group()) > LONGEST:
        return None
    number = Fraction(result["number"].replace(",", "") + (result["exponent"] or ""))
    if result["bottom"] is not None:
        if int(result["bottom"]) == 0:
            return None
        top, bottom = result["top"], int(result["bottom"])
        number = number / bottom if top is None else number + Fraction(int(top), bottom)
    return -number if "-" in result["front"] else number
