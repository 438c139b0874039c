"""Descriptions of values and types for messages about a configuration."""

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

from phalanx.config.secrets import hide

MOST_SHOWN = 200  # characters of a value in a message
MOST_SAID = 1000  # characters of an exception's message
_FOLDERS = re.compile(r"""(?<![\w.:/])/(?:[^/\s"']+/)+""")
_PACKAGE, _LIBRARY = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the user."""


class UnknownKeys(ConfigError):
    """Keys that a configuration does not have; the message about several has a line for each after the first.

    number: how many.
    """

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def told_as(
    kind: type[Exception], before: str = "", of: type[Exception] = ValueError, key: tuple[str, str] = ("", "")
) -> Iterator[None]:
    """Raise errors `of` this class in the block as errors of another `kind`, with words `before` their line. key: one
    that the line has, and its name for the user.
    """
    try:
        yield
    except of as error:
        raise kind(f"{before}{str(error).replace(*key)}") from error


@contextmanager
def users_code(before: str, end: str = "", kind: type[Exception] = ConfigError) -> Iterator[None]:
    """Raise whatever the user's code raises in the block as an error of this `kind`, other than one of that kind:
    `before`, its class and message, `end`, and the line of the code.
    """
    try:
        yield
    except kind:
        raise
    except (Exception, SystemExit) as error:
        where = "" if isinstance(error, SystemExit) else place(error)  # `reason` has its line
        raise kind(f"{before} {reason(error)}{end}{where}") from error


TYPES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
PLURALS = {int: "integers", float: "numbers", str: "strings"}


def cut(text: str, most: int = MOST_SHOWN) -> str:
    """The text, or its beginning and its length if it is too long."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def reason(error: BaseException) -> str:
    """Class and message of an exception in the user's code, as one line without secrets, which a model and readers of
    records see too; for `sys.exit` also the file and line.
    """
    try:
        text = str(error)
    except Exception as failure:  # __str__ is the user's code as well
        text = f"(its str() raised {type(failure).__name__})"
    return f"{type(error).__name__}: {cut(' '.join(hide(text).split()), MOST_SAID)}{_place(error)}"


def _place(error: BaseException) -> str:
    """Where a SystemExit was raised, whose message does not say it; empty for other exceptions."""
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, SystemExit) else []
    while frames and (frames[-1].name == "exit" or "_sitebuiltins" in frames[-1].filename):
        frames.pop()  # frames of the built-in `exit`, and of wandb's replacement of `sys.exit`
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def place(error: BaseException) -> str:
    """`, at /home/me/colour.py:12`: the innermost line of the user's own code in the traceback; empty without one."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = "site-packages" in path.parts or "dist-packages" in path.parts
        if path.is_file() and not (installed or path.is_relative_to(_PACKAGE) or path.is_relative_to(_LIBRARY)):
            return f", at {path}:{frame.lineno}"
    return ""


def without_folders(text: str) -> str:
    """The text with absolute paths reduced to their last component, for readers outside this machine."""
    return _FOLDERS.sub("", text)


def shown(value: Any) -> str:
    """A value as written in YAML, shortened if it is long."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else cut(repr(value))


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural if needed."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def aligned(rows: Sequence[Sequence[str]], texts: int) -> Iterator[str]:
    """The lines of a table: the first `texts` columns are left-aligned, the others, of numbers, right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [*map(str.ljust, row[:texts], widths), *map(str.rjust, row[texts:], widths[texts:])]
        yield "  ".join(cells).rstrip()


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean ...?` if a known word is similar, else an empty string."""
    near = close(word, known)
    return f"; did you mean {near}?" if near else ""


def close(word: str, known: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The most similar known word, ignoring case; None if none is similar enough."""
    by_case = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_case, 1, cutoff)
    return by_case[near[0]] if near else None


def element_of(hint: Any) -> Any:
    """The type of the elements of list[X] or Optional[list[X]]; None for any other type."""
    return get_args(bare(hint))[0] if get_origin(bare(hint)) is list else None


def expected(hint: Any) -> str:
    """A description of a type, such as "an integer or null"."""
    element, inner = element_of(hint), bare(hint)
    if element is not None:
        text = f"a list of {PLURALS[element] if element in PLURALS else 'sections'}"
    elif get_origin(inner) is dict:
        text = "a section of names and strings" if get_args(inner)[1] is str else "a section of keys and values"
    else:
        text = TYPES[inner] if inner in TYPES else type_name(inner)
    return text if inner is hint else f"{text} or null"


def type_name(hint: Any) -> str:
    """The name of a type in the configuration reference."""
    if bare(hint) is not hint:
        return f"{type_name(bare(hint))} or null"
    if get_args(hint):
        return f"{get_origin(hint).__name__}[{', '.join(map(type_name, get_args(hint)))}]"
    return hint.__name__ if isinstance(hint, type) else "any"


def bare(hint: Any) -> Any:
    """The X of Optional[X]; any other type unchanged."""
    choices = [a for a in get_args(hint) if a is not type(None)]
    return choices[0] if len(choices) < len(get_args(hint)) else hint


def check_divides(key: str, number: int, count: int, what: str) -> None:
    """Raise ConfigError unless the value of `key` divides `count`, which `what` has in place of {}."""
    if count % number:
        near = near_divisors(count, number)
        raise ConfigError(f"{key}: {number} does not divide {what.format(count)}; nearest that does: {near}")


def near_divisors(count: int, number: int) -> str:
    """The divisors of `count` next below and above a number that does not divide it: "2 or 4", or just one."""
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    near = [*[n for n in divisors if n < number][-1:], *[n for n in divisors if n > number][:1]]
    return " or ".join(map(str, near))


def near_multiples(number: int, unit: int) -> str:
    """The multiples of `unit` next below and above a number that is none, such as "4 or 6"."""
    below = max(number // unit, 1) * unit
    return f"{below} or {below + unit}"
