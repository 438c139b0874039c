"""Values of Python expressions and shell words in files of other trainers, computed without running anything."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import yaml

from phalanx.config.sources import parse_yaml

MOST = 10_000  # characters or elements of a value: a few lines that double one would fill the memory
LARGEST = 1e18
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.Gt: operator.gt,
    ast.In: lambda item, container: item in container,
}
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_NUMBER = re.compile(r"[+-]?\d+\.?\d*[eE][+-]?\d+")  # YAML reads 1.0e-6 as a number and 1e-6 as a text


class Unknown(ValueError):
    """A value that a file does not contain; the message says why."""


def attempt(compute: Callable[..., Any], *args: Any) -> Any:
    """The result of a function, or the Unknown that it raises."""
    try:
        return compute(*args)
    except Unknown as error:
        return error


def formula(text: str, names: Mapping[str, Any]) -> Any:
    """The value of an expression, see `evaluate`. Raises Unknown."""
    return evaluate(ast.parse(text, mode="eval").body, names)


def evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression of literals, arithmetic, conditions and known names.

    names: the values of names, also dotted ones. Raises Unknown.
    """
    try:
        value = _expression_value(node, names)
    except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
        raise Unknown(str(error) if isinstance(error, Unknown) else "its value is not in the file") from None
    if isinstance(value, str | list | dict) and len(value) > MOST:
        raise Unknown("its value is too long")
    if isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise Unknown("its value is too large")
    return value


def _expression_value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [evaluate(item, names) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {
                evaluate(key, names): evaluate(value, names) for key, value in zip(keys, values, strict=True) if key
            }
        case ast.Name() | ast.Attribute() if ast.unparse(node) in names:
            return names[ast.unparse(node)]
        case ast.Attribute(value=ast.Name(id="torch"), attr=dtype):
            return dtype
        case ast.Name() | ast.Attribute():
            raise Unknown(f"{ast.unparse(node)} has no plain value in the file")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand, names)
        case ast.IfExp(test=test, body=body, orelse=other):
            return evaluate(body if evaluate(test, names) else other, names)
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            one, two = evaluate(left, names), evaluate(right, names)
            numbers = isinstance(one, int | float) and isinstance(two, int | float)
            if type(op) in OPERATORS and (numbers or isinstance(op, ast.Add | ast.cmpop)):
                return OPERATORS[type(op)](one, two)
        case ast.Call(func=ast.Name(id="int"), args=[number]):
            return int(evaluate(number, names))
        case ast.Call(func=func, args=[first, *rest]) if ast.unparse(func) == "os.path.join":
            here = ast.unparse(first) == "os.getcwd()"
            return "/".join(map(str, [evaluate(part, names) for part in (rest if here else [first, *rest])]))
        case ast.JoinedStr(values=parts):
            return "".join(str(evaluate(part, names)) for part in parts)
        case ast.FormattedValue(value=inner, conversion=-1, format_spec=None):
            return evaluate(inner, names)
    raise Unknown("its value is not in the file")


def expanded(word: str, variables: Mapping[str, str | None]) -> str:
    """A shell word with its variables replaced; `${NAME:-text}` is `text` if the script does not set NAME.

    variables: None for one whose value is unknown. Raises Unknown.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        if name not in variables and match[2] is not None:
            return expanded(match[2], variables)
        value = variables.get(name)
        if value is None:
            where = "is decided when the script runs" if name in variables else "is not in the file"
            raise Unknown(f"the value of ${name} {where}")
        return value

    text = _VARIABLE.sub(replacement, word)
    if "$" in text:
        raise Unknown("the shell computes its value")
    if len(text) > MOST:
        raise Unknown("its value is too long")
    return text


def shell_value(words: Sequence[str], variables: Mapping[str, str | None]) -> Any:
    """The value of an option: true without a word, a list of several, and the word as YAML reads it. Raises Unknown."""
    values = list[Any]()
    for word in words:
        text = expanded(word, variables)
        try:
            value = plain(parse_yaml(text), text)
            # YAML leaves out what follows a # in a text without quotes, and reads `Question: …` as a section
            marks = "'\"" if isinstance(value, str) else "{[" if isinstance(value, dict | list) else None
            values.append(value if marks is None or text.lstrip()[0] in marks else text)
        except yaml.MarkedYAMLError:
            values.append(text)
    return values if len(values) > 1 else values[0] if values else True


def plain(value: Any, text: str = "") -> Any:
    """A value of YAML as JSON has it: numbers such as 1e-6 are no texts, and a date is the `text` of the file."""
    if isinstance(value, list):
        return [plain(item, str(item)) for item in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    if isinstance(value, dict):
        return {str(key): plain(item, str(item)) for key, item in value.items()}
    return None if value == "None" else value if isinstance(value, bool | int | float | str | None) else text
