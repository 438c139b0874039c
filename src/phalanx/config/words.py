"""Values and types in words, for messages about a configuration."""

from typing import Any, get_args, get_origin


def shown(value: Any) -> str:
    """A value as YAML has it, for messages."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


_WORDS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers"), str: ("a text", "texts")}
_WORDS[bool] = ("true or false", "truth values")


def words(hint: Any, value: Any) -> str:
    """A type in words, for messages; for a list an example that holds `value`."""
    arguments = [a for a in get_args(hint) if a is not type(None)]
    if get_origin(hint) is list:
        plural = _WORDS[arguments[0]][1] if arguments[0] in _WORDS else "sections"
        scalar = arguments[0] in _WORDS and isinstance(value, str | int | float)
        return f"a list of {plural}" + (f", e.g. [{value}]" if scalar else "")
    if get_origin(hint) is dict:
        return "a section of keys and values"
    if arguments:
        return f"{words(arguments[0], value)}, or null"
    return _WORDS[hint][0] if hint in _WORDS else type_name(hint)


def type_name(hint: Any) -> str:
    """A type as the configuration reference has it."""
    arguments = [a for a in get_args(hint) if a is not type(None)]
    if get_origin(hint) in (list, dict):
        return f"{get_origin(hint).__name__}[{', '.join(type_name(a) for a in arguments)}]"
    if arguments:
        return f"{type_name(arguments[0])} or null"
    return hint.__name__ if isinstance(hint, type) else "any"
