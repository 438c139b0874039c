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
# parts that make no difference: dollars, degrees, percent
_LAYOUT = re.compile(r"\\?[$%]|\^\s*\{?\\circ\}?|\\degree\b|\u00b0")
_DELIMITER = re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z]) ?")
# other spellings: of styles, the end of a row, words, sets and numbers
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:text)?color ?\{\w+\}|\\displaystyle(?![a-z])", ""),
        (r"\A ?\\(?:mathbf|boldsymbol|bm|pmb) ?\{((?=[^{}]*[\d\\])(?:[^{}]|\{[^{}]*\})*)\}\Z", r"\1"),
        (r"\\(?:text|mathrm|mathbf|mbox) ?\{ ?(i|[-+]?\d+(?:\.\d+)?) ?\}", r"\1"),
        (r"\\\\ ?\[-?[\d.]+ ?(?:pt|em|ex|mm|cm|in)\]|\\cr(?![a-z])", r"\\\\ "),
        (r"(?<=\d) ?\\(?:lor|vee)(?![a-z])(?=[^=<>]*[=<>])", " or "),  # not of propositions
        (r"(?<=\d) ?\\(?:land|wedge)(?![a-z])(?=[^=<>]*[=<>])|\\&", " and "),
        (r"\\(?:text|mathrm|mbox) ?\{ ?([,;]) ?\}", r"\1 "),
        (r"\\colon(?![a-z])", ":"),
        (r"\^ ?\{ ?\\(?:text|mathrm) ?\{ ?o ?\} ?\}", r"^\\circ"),
        (r"(\\mathbb ?\{?[CQRZ]\}?) ?- ?(?=\\\{)", r"\1\\setminus "),
        (r"\\\{ ?([a-z]) ?(?::|\||\\(?:mid|vert|colon)(?![a-z])) ?([^{}]*[<>][^{}]*|[^{}]*\\[gl]eq?[^{}]*)\\\}", r"\2"),
        (r"(?<![\w)\]}])\((\w+)\)_(?=\{?\(?\d)", r"\1_"),
        (r"_\{? ?\(?(?<=\()(\d+)\) ?\}?", r"_{\1}"),
    )
)
_OPEN = re.compile(r"([\[\]])([^\[\](){}=]*,[^\[\](){}=]*)([\[\]])")  # intervals as in France: [1,2[
_NAMED = re.compile(r"([a-z]) ?= ?((?:[^a-zA-Z=,\\&]|\\[a-z]+)+)")
_TIGHT = re.compile(r"(?<!\s)\s*\\!\s*")  # a negative space, as in 32,\!349
_PUNCTUATION = re.compile(
    r"(?<!\s)(?<!text)(?<!mbox)(?<!mathrm)\s*\{\s*([,:])\s*\}\s*"
)  # without the space that TeX puts after it, as in 32{,}349
# not the end of a matrix's row, \\ and a blank
_BLANK = re.compile(r"(?:(?<!\\)\\[,;:> ]|\\q?quad\b|\\thinspace\b|\\hspace\*?\{[^{}]*\}|~|\s)+")
# arguments of one character without braces: \frac 1 2, \sqrt2, \log_2 8
_TWO = re.compile(r"\\[dtc]?(frac|binom) ?([0-9a-z]) ?([0-9a-z])(?![0-9a-z])")
_ONE = re.compile(r"(\\sqrt|\\mathbb|[_^]) ?([0-9a-zA-Z])(?![0-9a-zA-Z])")
_ROOT = re.compile(r"\\sqrt ?([0-9a-z])")
_RATIO = re.compile(r"([+-]?)(\d+)/(\d+)")
_MIXED_RATIO = re.compile(r"(?<![\w.}])(\d++) (\d++)/(\d++)(?![\w./])")
_REPEATING = re.compile(r"(?<!\d)(\d{0,50})\.(\d{0,50})\\(?:overline|bar|dot) ?(?:\{(\d{1,50})\}|(\d))")
# thousands separated by commas or thin spaces; not in brackets, where the items of a list look the same
_THOUSANDS = re.compile(
    r"((?:[(\[]|\\\{)(?:[^()\[\]\\]|\\[^{}])*+(?:[)\]]|\\\}))|(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\\,)\d{3})+(?![\d,])"
)
# thousands separated by blanks, if the text has no other number
_SPACED = re.compile(r"\A([^\d(\[{,]*+)([1-9]\d{0,2}(?: \d{3})++)(?=(?:\.\d++)?\D*+\Z)")
_LIST = ("(", "[", r"\{")
_AND_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox) ?\{ ?(and|or) ?\}")
_AND = re.compile(r"(?:, | ,|[, ])?(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]) ?")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
_GREEK = r"\\(?:alpha|beta|gamma|delta|theta|phi|varphi|omega|lambda|mu|rho|sigma|tau)"
_NAME = re.compile(rf"[^\W\d_]{{1,2}}|[a-z]_\{{?\w\}}?|m?\\angle[A-Z]{{1,3}}|{_GREEK}")
_SPACED_LIST = re.compile(r"\d, +\d{3}(?!\d)")
_PARTED = re.compile(r"\d \.?\d")
_BASE = re.compile(r"\d_\{?(\d+)\}?")
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
_SCIENTIFIC = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]|(?:\\times|\\cdot)10\^)\{?([+-]?\d{1,3})\}?")
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


def written(text: str) -> str:
    r"""A formula in the spelling that math-verify reads rightly, without loss: arguments in braces, no `\left`, digits
    joined across thousands separators, one blank for each space, 1 1/2 as 1\frac{1}{2}, 0.\overline{3} as \frac{1}{3},
    and both values of a single `\pm`.
    """
    inner = boxed(text) if "\\boxed" in text or "\\fbox" in text else None
    text = (inner or text).replace("\u2212", "-").strip().rstrip(". \\")
    text = _PUNCTUATION.sub(r"\1", _TIGHT.sub("", text))
    for other, command in ((r"\varnothing", r"\emptyset"), (r"\lbrace", r"\{"), (r"\rbrace", r"\}")):
        text = text.replace(other, command)
    text = _DELIMITER.sub("", text)
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    text = re.sub("&", " and ", text) if r"\begin" not in text else text
    text = _tuple_values(_OPEN.sub(_half_open, text).strip().removeprefix("=").strip())
    if not text.startswith(_LIST):
        text = _THOUSANDS.sub(_join_digits, text)
    text = _SPACED.sub(lambda match: match[1] + match[2].replace(" ", ""), _BLANK.sub(" ", text).strip())
    text = _TWO.sub(r"\\\1{\2}{\3}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", _ONE.sub(r"\1{\2}", re.sub(r"\\[dtc]frac", r"\\frac", text)))
    text = _REPEATING.sub(_repeating_fraction, _MIXED_RATIO.sub(r"\1\\frac{\2}{\3}", text))
    text = _AND_WORDS.sub(r" \1 ", re.sub(r"\\\{ ?\\\}", r"\\emptyset", text))
    if len(_PLUS_MINUS.findall(text)) == 1:
        text = f"{_PLUS_MINUS.sub('+', text)}, {_PLUS_MINUS.sub('-', text)}"
    return text


def normalised(text: str) -> str:
    r"""A formula in normal form: as `written`, without units in `\text`, dollars, spaces and a final point; `1/2`
    becomes \frac{1}{2}, `x = 5` becomes 5, and `5 \text{ and } 6` becomes 5,6.
    """
    text = written(text)
    unit = _UNIT.search(text)
    if unit is not None and any(c.isdigit() for c in text[: unit.start()]):
        text = text[: unit.start()]
    text = _LAYOUT.sub("", _WORDS.sub(r" \1 ", text)).strip().rstrip(".")
    text = _AND.sub(",", _BLANK.sub(" ", text).strip()).replace(";", ",")
    # blanks have no meaning, except between digits, where they separate two numbers
    text = _without_name(re.sub(r"(?<!\d) | (?!\d)", "", text))
    ratio = _RATIO.fullmatch(text)
    if ratio is not None:
        return rf"{ratio[1]}\frac{{{ratio[2]}}}{{{ratio[3]}}}"
    return text.lower() if len(text) > 2 and text.isalpha() and text.istitle() else text  # Friday, not the angle ABC


def _without_name(text: str) -> str:
    """A normal form without the name of its values: 5 of x=5, and 5,6 of x=5,x=6."""
    first, sign, _ = text.partition("=")
    if not sign or _NAME.fullmatch(first) is None:
        return text
    first = first.partition("_")[0]
    values = []
    for item in text.split(","):
        name, sign, value = item.partition("=")
        if "=" in value or (sign and name.partition("_")[0] != first):
            return text
        values.append(value if sign else name)
    return ",".join(values)


def exact(text: str) -> Fraction | None:
    r"""The value of a normal form that is a number: 0.50, \frac{3}{4} or 1\frac{1}{2}; None for other texts."""
    if len(text) > LONGEST:
        return None
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    power = _SCIENTIFIC.fullmatch(text)
    if power is not None:
        return Fraction(power[1]) * Fraction(10) ** int(power[2])
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


def parted(text: str) -> bool:
    """Whether a `written` formula has two numbers with nothing but a blank between them."""
    return _PARTED.search(text) is not None


def bases(text: str) -> list[str]:
    r"""The bases of the numbers in a normal form: 8 of 2516_8 and 2516_{8}."""
    return _BASE.findall(text)


def same(answer: str, truth: str) -> bool:
    """Whether an answer equals the truth as a number or as a text in normal form. Of a truth that is a list with a
    blank after each comma, 2, 345, the answer 2,345 is the list, too.
    """
    if _SPACED_LIST.search(truth) is not None:
        answer = re.sub(r",(?=\d{3})", ", ", answer)
    some, others = normalised(answer), normalised(truth)
    if some == others:
        return some != ""
    value = exact(some)
    if value is not None and value == exact(others):
        return True
    decimal = number(some)
    return decimal is not None and decimal == number(others)


def _half_open(result: "re.Match[str]") -> str:
    """[1,2) of [1,2[; other pairs of brackets stay."""
    if result[1] + result[3] == "[]":
        return result.group()
    return ("[" if result[1] == "[" else "(") + result[2] + ("]" if result[3] == "]" else ")")


def _tuple_values(text: str) -> str:
    """(3,5) of x=3, y=5, and of y=5, x=3: values of different letters, in the order of the letters."""
    values = dict[str, str]()
    items = re.split(r",| and |\\(?:text|textrm|mathrm|mbox) ?\{ ?and ?\}", text)
    for item in items:
        named = _NAMED.fullmatch(item.strip())
        if named is not None:
            values[named[1]] = named[2].strip()
    return f"({','.join(values[name] for name in sorted(values))})" if len(values) == len(items) > 1 else text


def _join_digits(result: "re.Match[str]") -> str:
    return result[1] or re.sub(r"\D", "", result.group())


def _repeating_fraction(result: "re.Match[str]") -> str:
    r"""The fraction of a repeating decimal: \frac{7}{6} of 1.1\overline{6}."""
    first, period = result[1] + result[2], result[3] or result[4]
    value = Fraction(int(first + period) - int(first or 0), (10 ** len(period) - 1) * 10 ** len(result[2]))
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
