"""Answers that a verifier of reasoning-gym may be given where it evaluates them: lists, or formulas of small numbers.

Some verifiers call `eval`, or sympy's `parse_expr`, which calls it: an answer such as `__import__('os')` would run, and
`oracle_answer` would be right. Here answers are parsed and never run.
"""

import ast
import math
import re
from collections.abc import Mapping
from typing import Any

LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
FORMULAS = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
LONGEST = 1000  # characters of a formula
DEEPEST = 500  # operations within each other; a sum of n terms has n
MAX_BITS = 1024  # of a number in a formula, its powers computed
_FORMULA = re.compile(r"[A-Za-z0-9_.+*/() \t-]*")
_NAMES = ("C", "E", "pi", "e")  # of constants; variables have one letter
_FUNCTIONS = ("Abs", "acos", "asin", "atan", "cos", "cosh", "exp", "ln", "log", "sin", "sinh", "sqrt", "tan", "tanh")


def allowed(task: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Whether the task's verifier may be given the answer. Linear in its length."""
    # the right answer, of a task that has one, gives the size of those that can be right
    if len(answer) > 10_000 + 10 * len(str(entry.get("answer"))):
        return False
    if task in LISTS:
        return _is_plain(answer) or _is_list(answer)
    return task not in FORMULAS or is_formula(answer)


def _is_plain(answer: str) -> bool:
    """Capitals, digits and spaces, as a matrix or a board has them: no verifier names a variable so."""
    return re.fullmatch(r"[A-Z0-9_\s-]*", answer) is not None


def _is_list(answer: str) -> bool:
    """A list of Python, perhaps of lists, of numbers and texts."""
    try:
        return isinstance(ast.literal_eval(answer.strip()), list)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def is_formula(answer: str) -> bool:
    """A formula of numbers, variables, + - * / ** and known functions, of which no number has more than MAX_BITS."""
    if len(answer) > LONGEST or _FORMULA.fullmatch(answer) is None:
        return False
    try:
        return _bits(ast.parse(answer.strip(), mode="eval").body, DEEPEST) <= MAX_BITS
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _bits(node: ast.expr, depth: int) -> float:
    """A bound on the size of a formula's value, its variables up to 2, as bits; ValueError for anything else."""
    if depth == 0:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool) and math.isfinite(value):
            return math.log2(abs(value) + 1)
        case ast.Name(id=name) if len(name) == 1 or name in _NAMES:
            return 1.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _bits(operand, depth - 1)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _bits(argument, depth - 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _bits(left, depth - 1), _bits(right, depth - 1)
            return max(base, 1.0) * 2**exponent if exponent < 16 else math.inf
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            return _bits(left, depth - 1) + _bits(right, depth - 1)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return max(_bits(left, depth - 1), _bits(right, depth - 1)) + 1.0
    raise ValueError("no formula")
