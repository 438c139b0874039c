"""Functions and methods as tools: schemas for the chat template, and checks of the model's arguments."""

import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Union

from pydantic import (
    BeforeValidator,
    ConfigDict,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)

from phalanx.config.files import parse_json
from phalanx.config.messages import ConfigError, cut, nearest, reason
from phalanx.models.lm.schemas import parameter_types

_LENIENT = ConfigDict(coerce_numbers_to_str=True, arbitrary_types_allowed=True, allow_inf_nan=False)
# by type in a schema
_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": None}
_TYPES |= {"object": dict[str, Any], "array": list[Any]}


class BadCall(Exception):
    """The model called a tool that does not exist, or with invalid arguments; the message is for the model."""


@dataclass(frozen=True)
class Tool:
    """A tool: its schema, and the function that runs it, given an instance of the environment and the arguments."""

    name: str
    schema: dict[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
    run: Callable[[Any, dict[str, Any]], Any]
    types: Mapping[str, TypeAdapter[Any]]  # of its parameters
    required: frozenset[str]
    asynchronous: bool = False

    def checked(self, arguments: Any) -> dict[str, Any]:
        """The model's arguments, converted to the types of the parameters. Raises BadCall if they are invalid."""
        if isinstance(arguments, str):  # JSON, as in OpenAI's format, which a user's own parser may return
            with suppress(ValueError):
                arguments = parse_json(arguments)
        if not isinstance(arguments, dict):
            raise BadCall(
                f"the arguments of {self.name} should be an object with its parameters: {self._parameter_names}"
            )
        missing = sorted(self.required - arguments.keys())
        if missing:
            raise BadCall(f"{self.name} needs {', '.join(missing)}; its parameters: {self._parameter_names}")
        checked = {}
        for name, value in arguments.items():
            if name not in self.types:
                raise BadCall(
                    f"{self.name} has no parameter {cut(str(name), 40)}; its parameters: {self._parameter_names}"
                )
            try:
                checked[name] = self.types[name].validate_python(value)
            except ValidationError as error:
                raise BadCall(f"{self.name}: {name}: {error.errors()[0]['msg']}") from None
        return checked

    @property
    def _parameter_names(self) -> str:
        return ", ".join(self.types) or "none"


def method_tool(kind: type, name: str, key: str) -> Tool:
    """A method of an environment's class as a tool."""
    label = f"{kind.__name__}.{name}"
    described = vars(kind)[name] if name in vars(kind) else getattr(kind, name)
    function = getattr(kind, name)
    if inspect.isfunction(described):  # bound to any object, so that the signature lacks self
        function = function.__get__(object())
    return _make_tool(function, name, label, key, lambda instance, arguments: getattr(instance, name)(**arguments))


def function_tool(function: Callable[..., Any], key: str) -> Tool:
    """A stateless function as a tool."""
    name = function.__name__
    return _make_tool(function, name, name, key, lambda _, arguments: function(**arguments))


def schema_of(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema in OpenAI's format, from a JSON schema of its parameters."""
    keys = ("type", "properties", "required", "$defs", "definitions", "$ref", "allOf", "anyOf", "oneOf")
    kept = {key: value for key, value in parameters.items() if key in keys}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": kept}}


def schema_tool(schema: dict[str, Any], run: Callable[..., Any], *, asynchronous: bool = False) -> Tool:
    """A tool with a given schema; arguments are checked against the types that it allows."""
    function = schema["function"]
    parameters = function.get("parameters") or {}
    types = {}
    for name, allowed in parameter_types(parameters).named.items():
        types[name] = TypeAdapter[Any](_python_type(allowed), config=_LENIENT)
    required = frozenset(parameters.get("required") or ())
    return Tool(function["name"], schema, run, types, required, asynchronous)


def _python_type(allowed: frozenset[str]) -> Any:
    """The Python type of an argument; Any for types that exclude no text, or that are unknown."""
    kinds = {"string" if kind.startswith('"') else kind for kind in allowed}
    if not kinds or not kinds <= _TYPES.keys() or ("string" in kinds and kinds - {"string", "null"}):
        return Any
    kind: Any = Union[tuple(_TYPES[kind] for kind in sorted(kinds))]  # noqa: UP007 - of a number of types
    return kind if kinds.isdisjoint({"object", "array"}) else Annotated[kind, BeforeValidator(_from_text)]


def _from_text(value: Any) -> Any:
    """The object or the list that a model wrote as JSON within a text."""
    with suppress(ValueError):
        return parse_json(value) if isinstance(value, str) else value
    return value


def lenient(kind: Any) -> TypeAdapter[Any]:
    """A validator that accepts a number where a text is expected, unless the type has its own configuration."""
    try:
        return TypeAdapter(kind, config=_LENIENT)
    except PydanticUserError:
        return TypeAdapter(kind)


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def unknown(name: Any, tools: Mapping[str, Tool]) -> BadCall:
    """The error for a call of a tool that does not exist."""
    hint = nearest(str(name), list(tools))
    return BadCall(f"there is no tool {cut(str(name), 40)}{hint}; the tools: {', '.join(tools) or 'none'}")


def _make_tool(function: Callable[..., Any], name: str, label: str, key: str, run: Callable[..., Any]) -> Tool:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{key}: the tool {label} has the parameter {parameter}; expected named parameters")
    try:
        schema = get_json_schema(function)
        hints = typing.get_type_hints(function)
        types = {each: TypeAdapter(hints[each], config=_LENIENT) for each in parameters}
    except (DocstringParsingException, TypeHintParsingException, PydanticSchemaGenerationError) as error:
        raise ConfigError(
            f"{key}: the tool {label}: {cut(' '.join(str(error).split()))}; expected type hints, and a docstring that "
            "says what it does and, below Args:, describes each parameter"
        ) from None
    except Exception as error:  # type hints may be any expressions
        raise ConfigError(f"{key}: the tool {label}: {reason(error)}") from None
    empty = inspect.Parameter.empty
    required = frozenset(each for each, parameter in parameters.items() if parameter.default is empty)
    asynchronous = inspect.iscoroutinefunction(inspect.unwrap(function))
    schema["function"].pop("return", None)  # the description of the result, which no template shows
    return Tool(name, schema, run, types, required, asynchronous)
