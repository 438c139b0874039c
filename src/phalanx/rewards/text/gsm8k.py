"""Grade-school maths (GSM8K): the answer behind the last `####` of a solution.

`strict` takes the number behind the last `#### `, `flexible` the last number at all; both of the last 300 characters,
as verl does. Unlike there, numbers are compared as numbers: `$18`, `18.`, `18.0` and `1,018` are what they say.
"""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

_NUMBER = r"-?\$?[\d,]*\.?\d+"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(_NUMBER)
TAIL = 300


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


def _wanted(metadata: Mapping[str, Any]) -> Decimal:
    """The number that a row's ground truth gives; ValueError where there is none."""
    if "ground_truth" not in metadata:
        raise ValueError("gsm8k needs a ground_truth for each prompt, a number or a solution that ends in ####")
    wanted = truth(metadata["ground_truth"])
    if wanted is None:
        raise ValueError(f"gsm8k found the ground_truth {str(metadata['ground_truth'])[-80:]!r}, which is no number")
    return wanted


def answer(text: str, method: str = "strict") -> Decimal | None:
    """The number that a solution gives, None without one."""
    numbers = (_MARKED if method == "strict" else _ANY).findall(text[-TAIL:])
    return _number(numbers[-1]) if numbers else None


def truth(value: Any) -> Decimal | None:
    """A ground truth as a number: one, its text, or a solution that ends in `#### 18`."""
    text = str(value)
    return answer(text) if "####" in text else _number(text.strip())


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "").rstrip("."))
    except InvalidOperation:
        return None
