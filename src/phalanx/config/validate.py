"""Validation of values by pydantic, from the types of a schema and the constraints of `arg`.

A message names the key, the expected value and the given one.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from math import isfinite
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic_core import ErrorDetails, PydanticCustomError

from phalanx.config.fields import PLAIN
from phalanx.config.messages import ConfigError, bare, cut, element_of, expected, nearest, shown

MOST = 1e9  # limit of the absolute value of a number whose key sets no other limit
LIMITS = {"greater_than": "more than", "greater_than_equal": "at least", "less_than": "less than"}
LIMITS |= {"less_than_equal": "at most"}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates stand for bytes that are not UTF-8
PLACES = ("output_dir", "output_file", "checkpoint", "baseline")  # paths that must not be empty (the current folder)
_CONFIG = ConfigDict(extra="forbid")


@cache
def hints_of(schema: Any) -> dict[str, Any]:
    """The type of each field; for a section whose keys depend on a name, the class of its default."""
    hints = get_type_hints(schema)
    return {f.name: f.default_factory if "registry" in f.metadata else hints[f.name] for f in fields(schema)}


def is_section(hint: Any) -> bool:
    """Whether a type is that of a section: a dataclass."""
    return is_dataclass(hint)


def validated(schema: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values of some keys of a schema, converted to their types. Raises ConfigError for the first wrong one."""
    try:
        return _model(schema).model_validate(values).model_dump(by_alias=True, exclude_unset=True)
    except ValidationError as error:
        raise ConfigError(_message(schema, values, error.errors(include_url=False)[0])) from None


@cache
def _model(schema: Any) -> type[BaseModel]:
    """The model that validates a section. The keys are aliases of fields, whose names are none of pydantic's."""
    members: dict[str, Any] = {}
    for name, hint in hints_of(schema).items():
        meta = PLAIN | dict(next(f for f in fields(schema) if f.name == name).metadata)
        if name in PLACES:
            meta["valid"] = lambda path: None if path.strip() else "a path"
        members[f"key_{name}"] = (_type(hint, meta), Field(None, alias=name))
    return create_model(schema.__name__, __config__=_CONFIG, **members)


def _type(hint: Any, meta: dict[str, Any]) -> Any:
    """The type by which pydantic validates a value of this type with the constraints of `arg`."""
    if bare(hint) is not hint:
        return _type(bare(hint), meta) | None
    checks: list[Any] = [AfterValidator(_checked(meta["valid"]))] if meta["valid"] is not None else []
    if is_section(hint):
        kind: Any = _model(hint)
    elif get_origin(hint) is list:
        kind = list[_type(get_args(hint)[0], PLAIN | {"limits": meta["each"]})]  # type: ignore[misc]
        checks.insert(0, BeforeValidator(_several(meta["single"])))
    elif get_origin(hint) is dict and get_args(hint)[1] is not Any:
        kind = dict[str, _type(get_args(hint)[1], PLAIN)]  # type: ignore[misc]
    elif hint is str:
        kind = Annotated[str, BeforeValidator(_text), AfterValidator(_printable), AfterValidator(_one_of(meta))]
    elif hint in (int, float):
        limits = {"ge": -MOST} | ({} if "lt" in meta["limits"] else {"le": MOST}) | meta["limits"]
        options: dict[str, Any] = {"allow_inf_nan": False} if hint is float else {}
        for name, limit in limits.items():
            options[name] = hint(limit)
        kind = Annotated[hint, Field(strict=True, **options), BeforeValidator(_number(hint))]
    elif hint is bool:
        kind = bool
    else:
        kind = Annotated[hint, AfterValidator(_free)]
    for check in checks:
        kind = Annotated[kind, check]
    return kind


def _wrong(words: str, **context: Any) -> PydanticCustomError:
    """The error of a value in place of which `words` are expected."""
    return PydanticCustomError("expected", "expected {words}", {"words": words, **context})


def _checked(valid: Callable[[Any], str | None]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        words = valid(value)
        if words is not None:
            raise _wrong(words)
        return value

    return check


def _one_of(meta: dict[str, Any]) -> Callable[[str], str]:
    def check(value: str) -> str:
        choices = meta["choices"]
        if choices and value not in choices and not (meta["forms"] and ":" in value):
            raise _wrong(f"one of {', '.join((*choices, *meta['forms']))}", near=nearest(value, choices))
        return value

    return check


def _several(single: str) -> Callable[[Any], Any]:
    return lambda value: [value] if isinstance(value, str) and re.fullmatch(single, value) else value


def _text(value: Any) -> Any:
    """Numbers are texts, too, such as a name of digits."""
    return str(value) if isinstance(value, int | float) else value


def _number(kind: type) -> Callable[[Any], Any]:
    """Texts of numbers are numbers, such as the value of an environment variable, and integers are numbers, too."""

    def convert(value: Any) -> Any:
        if isinstance(value, str) or (type(value) is int and kind is float):
            with suppress(ValueError, OverflowError):
                return kind(value)
        return value

    return convert


def _printable(value: str) -> str:
    if _CONTROL.search(value):
        raise _wrong("text in UTF-8 without control characters")
    return value


def _free(value: Any, at: str = "") -> Any:
    """Check the texts and numbers in a free-form value, such as the arguments of a reward."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        _free(item, f"{at}[{name}]" if isinstance(value, list) else f"{at}.{name}")
    if isinstance(value, str) and _CONTROL.search(value):
        raise _wrong("text in UTF-8 without control characters", at=at, value=value)
    if isinstance(value, float) and not isfinite(value):
        raise _wrong("a finite number", at=at, value=value)
    return value


# --- messages


def _message(schema: Any, values: Any, error: ErrorDetails) -> str:
    """The line about pydantic's error."""
    hint, key, value, rest = schema, "", values, list(error["loc"])
    while rest:
        section, element = bare(hint), element_of(hint)
        if is_section(section) and isinstance(value, dict):
            hint, key = hints_of(section)[str(rest[0])], f"{key}.{rest[0]}".lstrip(".")
        elif is_section(element) and isinstance(value, list):
            hint, key = element, f"{key}[{rest[0]}]"
        else:
            break
        value = value[rest.pop(0)]
    context = error.get("ctx", {})
    if error["type"] == "expected":
        words, value = context["words"], context.get("value", error["input"])
    elif error["type"] in LIMITS:
        (limit,), value = context.values(), error["input"]
        words = f"{LIMITS[error['type']]} {limit:g}"
    elif error["type"] == "finite_number":
        words, value = "a finite number", error["input"]
    elif is_section(bare(hint)):
        return f"{key}: expected a section, got {shown(value)}; its keys: {', '.join(hints_of(bare(hint)))}"
    else:
        example = f"; write [{value}]" if type(value) is element_of(hint) else ""
        return f"{key}: expected {expected(hint)}, got {shown(value)}{example}"
    for part in rest:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"{key}{context.get('at', '')}: expected {words}, got {cut(repr(value))}{context.get('near', '')}"
