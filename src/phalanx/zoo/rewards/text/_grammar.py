"""Which answers may be passed to verifiers of reasoning-gym that evaluate them: lists, and formulas of small numbers.

Some verifiers call `eval`, or sympy's `parse_expr`, which calls it: they would run an answer such as
`__import__('os')`, and accept `oracle_answer` as right. Here answers are parsed and never run.
"""

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
FORMULAS = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
LONGEST = 1000  # maximum characters of a formula
DEEPEST = 500  # maximum depth of nested operations; a sum of n terms has depth n
MAX_BITS = 1024  # maximum size of a number in a formula, with powers evaluated
_FORMULA = re.compile(r"[A-Za-z0-9_.+*/() \t-]*")
_NAMES = ("C", "E", "pi", "e")  # of constants; variables have one letter
_FUNCTIONS = ("Abs", "acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "sin", "sinh", "sqrt", "tan", "tanh")


def allowed(task: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether the answer may be passed to the task's verifier. Takes linear time in the answer's length."""
    # an answer that is much longer than the right one, if the task has one, cannot be right
    if len(answer) > 10_000 + 10 * len(str(entry.get("answer"))):
        return False
    if task in LISTS:
        return _is_plain(answer) or _is_list(answer)
    return task not in FORMULAS or is_formula(answer)


def _is_plain(answer: str) -> bool:
    """Whether it consists of capitals, digits and spaces, as matrices and boards do: no verifier's variable does."""
    return re.fullmatch(r"[A-Z0-9_\s-]*", answer) is not None


def _is_list(answer: str) -> bool:
    """Whether it is a literal list of Python, perhaps nested."""
    try:
        return isinstance(ast.literal_eval(answer.strip()), list)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def is_formula(answer: str) -> bool:
    """Whether it is a formula of numbers, variables, + - * / ** and known functions, whose value fits in MAX_BITS."""
    if len(answer) > LONGEST or _FORMULA.fullmatch(answer) is None:
        return False
    try:
        return _bit_bound(ast.parse(answer.strip(), mode="eval").body, DEEPEST) <= MAX_BITS
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _bit_bound(node: ast.expr, depth: int) -> float:
    """An upper bound on the bits of a formula's value for variables up to 2. Raises ValueError for anything else."""
    if depth == 0:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and math.isfinite(value):
            return math.log2(abs(value) + 1)
        case ast.Name(id=name) if len(name) == 1 or name in _NAMES:
            return 1.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _bit_bound(operand, depth - 1)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _bit_bound(argument, depth - 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _bit_bound(left, depth - 1), _bit_bound(right, depth - 1)
            return max(base, 1.0) * 2**exponent if exponent < 16 else math.inf
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return _bit_bound(left, depth - 1) + _bit_bound(right, depth - 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return max(_bit_bound(left, depth - 1), _bit_bound(right, depth - 1)) + 1.0
    raise ValueError("not a formula")
