"""Keyword arguments of rewards and environments: names by the signature, types by the annotations."""

import inspect
import json
from collections.abc import Callable, Collection
from typing import Any

from phalanx.config.messages import ConfigError, cut


def check_arguments(
    function: Callable[..., Any],
    args: tuple[str, ...],
    kwargs: dict[str, Any],
    key: str,
    label: str,
    hidden: tuple[str, ...] = (),
    ours: Collection[str] = (),
) -> None:
    """Raise ConfigError if `function`, in messages `label`, cannot be called with the positional arguments `args` and
    with `kwargs`. `hidden`: those of the kwargs that a message does not name. `ours`: those that the user has not set.
    """
    signature = signature_of(function, key, label)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = list(signature.parameters)[len(args) :]
        takes = ", ".join(name for name in names if name not in hidden) or "none"
        call = ", ".join((*args, "**kwargs"))
        raise ConfigError(f"{key}: {label}({call}): {error}; its kwargs: {takes}") from None
    given = {name: value for name, value in kwargs.items() if name not in hidden and name not in ours}
    _check_types(function, given, key, label)


def _check_types(function: Callable[..., Any], kwargs: dict[str, Any], key: str, label: str) -> None:
    """Raise ConfigError for the first argument that is not of the type in the function's annotations."""
    if not kwargs or "__pydantic_validator__" in dir(function):  # a class of pydantic checks its own
        return
    # not at the top, so that other mistakes are found sooner
    from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

    # annotations that are not types or do not exist
    unchecked = (PydanticSchemaGenerationError, PydanticUserError, NameError, AttributeError, TypeError, SyntaxError)
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except unchecked:
        return
    for name, value in kwargs.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.annotation is parameter.empty:
            continue
        if type(value) is type(parameter.default) and value == parameter.default:  # such as None for `x: int = None`
            continue
        integral = isinstance(value, float) and value.is_integer()  # YAML writes a million as 1e6
        try:
            # in JSON's strict mode a list may be a tuple and an integer a number, but no text is a number
            text = json.dumps(int(value) if integral and parameter.annotation is int else value)
            TypeAdapter[Any](parameter.annotation).validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, (name, *(part for part in first["loc"] if isinstance(part, int)))))
            should = " ".join(first["msg"].removeprefix("Value error, ").removeprefix("Input ").split())
            raise ConfigError(f"{key}: {label}: {where}={cut(repr(first['input']))} {should}") from None
        except unchecked:
            continue


def signature_of(function: Callable[..., Any], key: str, label: str) -> inspect.Signature:
    """The signature of a function or class. Raises ConfigError if it has none."""
    try:
        return inspect.signature(function)
    except ValueError:  # of some builtins, which are written in C
        raise ConfigError(f"{key}: {label} has no signature; expected a function or class written in Python") from None
