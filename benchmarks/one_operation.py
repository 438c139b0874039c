"""A tool for learn_tools.py: the built-in calculator with one operation per call."""

import re

from phalanx.zoo.environments.calculator import Calculator


def calculator(expression: str) -> str:
    """Computes the value of one operation on two numbers.

    Args:
        expression: The operation, such as 3 * 4
    """
    if len(re.findall(r"[-+*/%]", expression)) > 1:
        return "error: more than one operation"
    return Calculator().calculator(expression)
