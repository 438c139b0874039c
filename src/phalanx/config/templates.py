"""Templates that users write for `str.format`."""

import re
import string

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
