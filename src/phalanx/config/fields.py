"""Keys of a configuration: dataclass fields with a help text and bounds."""

import math
import operator
from collections.abc import Sequence
from dataclasses import field
from typing import Any

LIMITS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "lt": (operator.lt, "less than"),
    "le": (operator.le, "at most"),
}


def arg(
    default: Any,
    help: str,
    *,
    path: bool = False,
    choices: Sequence[str] = (),
    forms: Sequence[str] = (),
    **limits: float,
) -> Any:
    """A dataclass field with its help text and constraints.

    choices: allowed values. forms: descriptions of further values that are allowed besides `choices`: any text with a
    colon, such as module:Class. path: whether `located` resolves the value. limits: bounds of a number, see LIMITS.
    """
    metadata = {"help": help, "path": path, "choices": choices, "forms": forms, "limits": limits}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


PLAIN = dict(arg(None, "").metadata)  # for fields that `arg` did not make
FREE = dict(arg(None, "", ge=-math.inf, le=math.inf).metadata)  # for free-form values, such as a reward's arguments
