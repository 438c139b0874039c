"""Values and types in words, for messages about a configuration."""

import difflib
import traceback
from collections.abc import Sequence
from typing import Any, get_args, get_origin

MOST_SHOWN = 200  # characters of a value
MOST_SAID = 1000  # and of what an exception says


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the user."""


TYPES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
PLURALS = {int: "integers", float: "numbers", str: "strings"}


def cut(text: str, most: int = MOST_SHOWN) -> str:
    """A text, or the beginning of a long one."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def reason(error: BaseException) -> str:
    """The class and message of an exception of the user's code, in one line; of `sys.exit` also the file and line."""
    try:
        text = str(error)
    except Exception as failure:  # it is the user's code as well
        text = f"(str() of it raised {type(failure).__name__})"
    return f"{type(error).__name__}: {cut(' '.join(text.split()), MOST_SAID)}{_place(error)}"


def _place(error: BaseException) -> str:
    """Where an exception that says nothing of itself was raised."""
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, SystemExit) else []
    while frames and (frames[-1].name == "exit" or "_sitebuiltins" in frames[-1].filename):
        frames.pop()  # the built-in `exit`, and what wandb puts in the place of `sys.exit`
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def shown(value: Any) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else cut(repr(value))


def counted(number: int, noun: str) -> str:
    """A number of things, in words."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean ...?` where one of the known words is near, else nothing."""
    near = close(word, known)
    return f"; did you mean {near}?" if near else ""


def close(word: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The known word that is nearest, in whatever case it is written; None where none is near."""
    by_case = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_case, 1, cutoff)
    return by_case[near[0]] if near else None


def element_of(hint: Any) -> Any:
    """The type of the elements of list[X] or Optional[list[X]]; None for any other type."""
    return get_args(_bare(hint))[0] if get_origin(_bare(hint)) is list else None


def expected(hint: Any) -> str:
    """A type in words."""
    element, bare = element_of(hint), _bare(hint)
    if element is not None:
        text = f"a list of {PLURALS[element] if element in PLURALS else 'sections'}"
    elif get_origin(bare) is dict:
        text = "a section of names and strings" if get_args(bare)[1] is str else "a section of keys and values"
    else:
        text = TYPES[bare] if bare in TYPES else type_name(bare)
    return text if bare is hint else f"{text} or null"


def type_name(hint: Any) -> str:
    """A type as the configuration reference has it."""
    if _bare(hint) is not hint:
        return f"{type_name(_bare(hint))} or null"
    if get_args(hint):
        return f"{get_origin(hint).__name__}[{', '.join(map(type_name, get_args(hint)))}]"
    return hint.__name__ if isinstance(hint, type) else "any"


def _bare(hint: Any) -> Any:
    """The X of Optional[X]; any other type as it is."""
    choices = [a for a in get_args(hint) if a is not type(None)]
    return choices[0] if len(choices) < len(get_args(hint)) else hint


def near_divisors(count: int, number: int) -> str:
    """The divisors of `count` just below and above a number that is none: "2 or 4", or one where there is no other."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    near = [*[n for n in divisors if n < number][-1:], *[n for n in divisors if n > number][:1]]
    return " or ".join(map(str, near))
