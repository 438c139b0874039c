"""Tool: a calculator."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

_BITS = 4096  # maximum size of an integer: 1233 digits
_LONGEST = 500  # maximum characters of an expression
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _round_number(number: int | float, digits: int | None = None) -> int | float:
    # for an integer, Python computes 10 ** -digits while it holds the GIL
    return round(number) if digits is None else round(number, max(digits, -_BITS))


_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "ceil": math.ceil, "cos": math.cos, "exp": math.exp, "floor": math.floor, "gcd": math.gcd,
    "log": math.log, "log10": math.log10, "log2": math.log2, "max": max, "min": min, "round": _round_number,
    "sin": math.sin, "sqrt": math.sqrt, "tan": math.tan,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}
_KNOWN = "numbers, + - * / // % **, parentheses, pi, e, and " + ", ".join(_FUNCTIONS)


class _Refused(Exception):
    """The expression is not evaluated; the message is for the model."""


class Calculator:
    """One tool, which evaluates an arithmetic expression without running it as code."""

    def calculator(self, expression: str) -> str:
        """Computes the value of an arithmetic expression.

        Args:
            expression: The expression, such as (3 + 4) * 2 ** 5 or sqrt(2)
        """
        try:
            if len(expression) > _LONGEST:
                raise _Refused(f"the expression has {len(expression)} characters; at most {_LONGEST} are allowed")
            return str(_node_value(ast.parse(expression.strip().replace("^", "**"), mode="eval").body))
        except SyntaxError:
            return "error: this is no arithmetic expression"
        except (_Refused, ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
            return f"error: {error}"


def _node_value(node: ast.expr) -> int | float:
    """The value of a node of an expression."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.Name) and node.id in _CONSTANTS:
        value = _CONSTANTS[node.id]
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_node_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _node_value(node.left), _node_value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        value = _BINARY[type(node.op)](left, right)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise _Refused("functions take no keywords")
        value = _FUNCTIONS[node.func.id](*[_node_value(each) for each in node.args])
    else:
        raise _Refused(f"{ast.unparse(node)[:40]!r} is not known; known: {_KNOWN}")
    if isinstance(value, complex):
        raise _Refused("the result is no real number")
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise _Refused("a number is too large")
    return value


def _check_power(base: int | float, exponent: int | float) -> None:
    """Refuse a large power of integers before it is computed, which would take long."""
    integers = isinstance(base, int) and isinstance(exponent, int)
    if integers and abs(base) > 1 and exponent * (int(abs(base)).bit_length() - 1) > _BITS:
        raise _Refused("a number is too large")
