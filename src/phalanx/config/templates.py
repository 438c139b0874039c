"""Templates that users write for `str.format`."""

import re
import string
from contextlib import suppress

WIDEST = 10_000  # characters that a field may be filled up to


def too_wide(template: str) -> str | None:
    """The first field of a template that `str.format` would fill up to more than WIDEST characters, or whose width is
    the value of another field; None if there is none. Raises ValueError for a template that is not valid.
    """
    for _, name, form, _ in string.Formatter().parse(template):
        width = re.sub(r"\.\d+", "", form or "")  # a precision only cuts
        if "{" in width or any(
            len(number.lstrip("0")) > 9 or int(number) > WIDEST for number in re.findall(r"\d+", width)
        ):
            return f"{{{name}:{form}}}"
    return None


def has_fields(template: str, *names: str) -> bool:
    """Whether `str.format` fills a template's places of these names, or {} without names, each once, and not up to an
    absurd width.
    """
    marks = {name: f"\0{name}\0" for name in names or ("",)}
    with suppress(IndexError, KeyError, ValueError):
        text = template.format(**marks) if names else template.format(marks[""])
        return too_wide(template) is None and {text.count(mark) for mark in marks.values()} == {1}
    return False
