"""Keys of a configuration: dataclass fields with a help text and constraints."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from phalanx.config.choices import Choice


def arg(
    default: Any,
    help: str,
    *,
    path: bool = False,
    choices: Sequence[str] = (),
    forms: Sequence[str] = (),
    each: Mapping[str, float] | None = None,
    single: str = "",
    valid: Callable[[Any], str | None] | None = None,
    only: Sequence[Choice] = (),
    **limits: float,
) -> Any:
    """A dataclass field with its help text and constraints.

    choices: allowed values. forms: descriptions of further values that are allowed besides `choices`: any text with a
    colon, such as module:Class. path: whether `located` resolves the value. each: bounds of a list's numbers. single: a
    regular expression of texts that stand for a list of one. valid: function of a value of the key's type; it returns
    what is expected instead, in words, or None. only: the choices without which there is no such key. limits: bounds of
    a number: ge, gt, lt and le, as pydantic calls them.
    """
    metadata = {"help": help, "path": path, "choices": choices, "forms": forms, "limits": limits}
    metadata |= {"each": each or {}, "single": single, "valid": valid, "only": only}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


PLAIN = dict(arg(None, "").metadata)  # for fields that `arg` did not make
