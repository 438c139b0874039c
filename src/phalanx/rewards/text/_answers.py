"""Extracts answers from texts, and compares them as numbers or as normalised texts."""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

LONGEST = 1000  # maximum characters of an answer
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# words at the end, after a quantity, are its unit
_UNIT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}\s*(?:\^\s*\{?\d\}?)?\s*\Z")
# parts that make no difference: layout, dollars, degrees, percent
_LAYOUT = re.compile(r"\\(?:left|right)(?![a-z])|\\!|\\?[$%]|\^\s*\{?\\circ\}?|\\degree\b|\u00b0")
_BLANK = re.compile(r"(?:\\[,;:> ]|\\q?quad\b|~|\s)+")
_SHORT = re.compile(r"\\(frac|sqrt)(?:\s*)([0-9a-z])(?:([0-9a-z])(?![0-9a-z]))?")
_RATIO = re.compile(r"([+-]?)(?:(\d+) )?(\d+)/(\d+)")
# thousands separated by commas or thin spaces; not applied to lists in brackets, whose items look the same
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\\,)\d{3})+(?![\d,])")
_LIST = ("(", "[", r"\{", r"\left")
_BASE = re.compile(r"\d_\{?(\d+)\}?")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
_MIXED = re.compile(r"([+-]?)(\d*)\\frac\{(\d+)\}\{(\d+)\}")


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...}, with matched braces, or of \boxed x; None if it has no end."""
    result = list(_BOX.finditer(text))
    if not result:
        return None
    begin = result[-1].end()
    if text[begin : begin + 1] != "{":
        word = re.match(r"[^\s$]+", text[begin : begin + LONGEST])
        return None if word is None else word.group()
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[begin:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[begin + 1 : begin + brace.start()].strip()
    return None


def tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer>."""
    content, end = None, 0
    # a regular expression would search for the end of each tag separately, in quadratic time if there is none
    while (begin := text.find("<answer>", end)) >= 0 and (close := text.find("</answer>", begin)) >= 0:
        content, end = text[begin + len("<answer>") : close], close + len("</answer>")
    return None if content is None else content.strip()


def line(text: str) -> str | None:
    """The rest of the line after the last `Answer:`."""
    result = _LINE.findall(text)
    return result[-1].strip("* ") if result else None  # also of **Answer:** 34


def marked(text: str) -> str | None:
    """The rest of the line after the last ####."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() or None if mark else None


def whole(text: str) -> str | None:
    """The text itself."""
    return text.strip() or None


FORMS: dict[str, Callable[[str], str | None]] = {
    "boxed": boxed,
    "answer": tagged,
    "line": line,
    "hash": marked,
    "whole": whole,
}


def form(name: str) -> Callable[[str], str | None]:
    """The function that extracts an answer in the form `name`. Raises ValueError for an unknown form."""
    if name not in FORMS:
        raise ValueError(f"answer={name!r} should be one of {', '.join(FORMS)}")
    return FORMS[name]


def truth(metadata: Mapping[str, Any], reward: str) -> str:
    """The ground truth as a text; if it is a whole solution, its answer. Raises ValueError if there is none."""
    value = metadata.get("ground_truth")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        result = "no ground_truth" if value is None else f"a ground_truth of type {type(value).__name__}"
        raise ValueError(f"{reward} found {result}; expected a text or a number in the data's column ground_truth")
    text = str(value)
    if text.strip().lower() == "nan":  # tables have this for a missing value
        raise ValueError(f"{reward} found the ground_truth {text.strip()}; expected a text or a number")
    result = boxed(text) or (marked(text) if "####" in text else None) or text.strip()
    if not result:
        raise ValueError(f"{reward} found an empty ground_truth; expected a text or a number")
    return result


def number(text: str) -> Decimal | None:
    """The value of a text that is a finite number, such as `18.0`; None for any other text."""
    try:
        result = Decimal("nan" if "_" in text else text)
    except InvalidOperation:
        return None
    return result if result.is_finite() else None


def normalised(text: str) -> str:
    r"""A formula in normal form: without `\left`, `\dfrac`, units in `\text`, dollars, spaces and a final point;
    `\frac12` and `1/2` become \frac{1}{2}, and `x = 5` becomes 5. Digits are joined only across thousands separators.
    """
    inner = boxed(text) if "\\boxed" in text or "\\fbox" in text else None
    text = (inner or text).replace("\u2212", "-").strip().rstrip(".").strip()
    unit = _UNIT.search(text)
    if unit is not None and any(c.isdigit() for c in text[: unit.start()]):
        text = text[: unit.start()]
    text = _WORDS.sub(r" \1 ", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = _LAYOUT.sub("", text.replace("{,}", ",")).strip().rstrip(".")
    if not text.startswith(_LIST):
        text = _THOUSANDS.sub(_joined, text)
    name, sign, value = text.partition("=")
    if sign and len(name.strip()) <= 2 and name.strip().isalpha() and "=" not in value:
        text = value
    # blanks have no meaning, except between digits, where they separate two numbers
    text = re.sub(r"(?<!\d) | (?!\d)", "", _BLANK.sub(" ", text).strip())
    text = _SHORT.sub(_with_braces, text)
    ratio = _RATIO.fullmatch(text)
    if ratio is not None:
        text = rf"{ratio[1]}{ratio[2] or ''}\frac{{{ratio[3]}}}{{{ratio[4]}}}"
    return text


def exact(text: str) -> Fraction | None:
    r"""The value of a normal form that is a number: 0.50, \frac{3}{4} or 1\frac{1}{2}; None for other texts."""
    if len(text) > LONGEST:
        return None
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    mixed = _MIXED.fullmatch(text)
    if mixed is None or int(mixed[4]) == 0:
        return None
    value = int(mixed[2] or 0) + Fraction(int(mixed[3]), int(mixed[4]))
    return -value if mixed[1] == "-" else value


def canonical(answer: str) -> str | None:
    """A text that is equal for all answers that are the `same`; None for an empty answer."""
    text = normalised(answer)
    value, decimal = exact(text), number(text)
    if value is None and decimal is not None and len(text) <= LONGEST and abs(decimal.adjusted()) <= LONGEST:
        value = Fraction(decimal)
    return text or None if value is None else str(value)


def parted(text: str, other: str) -> bool:
    """Whether a normal form has digits separated only by a blank or a comma, and the other one is not a list."""
    pattern = r"\d[ ,]\d"
    return re.search(pattern, text) is not None and re.search(f"{pattern}|,", other) is None


def bases(text: str) -> list[str]:
    r"""The bases of the numbers in a normal form: 8 of 2516_8 and 2516_{8}."""
    return _BASE.findall(text)


def same(answer: str, other: str) -> bool:
    """Whether two answers are equal as numbers or as texts in normal form."""
    some, others = normalised(answer), normalised(other)
    if some == others:
        return some != ""
    value = exact(some)
    if value is not None and value == exact(others):
        return True
    decimal = number(some)
    return decimal is not None and decimal == number(others)


def _joined(result: "re.Match[str]") -> str:
    return re.sub(r"\D", "", result.group())


def _with_braces(result: "re.Match[str]") -> str:
    command, first, second = result.groups()
    if command == "frac" and second is None:
        return result.group()
    rest = "" if second is None else f"{{{second}}}" if command == "frac" else second
    return f"\\{command}{{{first}}}{rest}"
