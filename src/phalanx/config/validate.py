"""Validation of values by pydantic, from the types of a schema and the constraints of `arg`.

A message names the key, the expected value and the given one.
"""

import json
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from math import isfinite
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from phalanx.config.fields import PLAIN
from phalanx.config.messages import ConfigError, bare, cut, element_of, expected, nearest, shown
from phalanx.config.ranges import DTYPES, FLOAT16, NO_FLOAT16

MOST = 1e9  # limit of the absolute value of a number whose key sets no other limit
LIMITS = {"greater_than": "more than", "greater_than_equal": "at least", "less_than": "less than"}
LIMITS |= {"less_than_equal": "at most"}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # surrogates stand for bytes that are not UTF-8
PLACES = ("output_dir", "output_file", "checkpoint", "baseline")  # paths that must not be empty (the current folder)
_CONFIG = ConfigDict(extra="forbid")


class _Wrong(ValueError):
    """A value in place of which `words` are expected. near: a hint. at: its key within a free-form value `value`."""

    def __init__(self, words: str, near: str = "", at: str = "", value: Any = None) -> None:
        super().__init__(words)
        self.words, self.near, self.at, self.value = words, near, at, value


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
        return _section_model(schema).model_validate(values).model_dump(by_alias=True, exclude_unset=True)
    except ValidationError as error:
        raise ConfigError(_error_line(schema, values, error.errors(include_url=False)[0])) from None


@cache
def _section_model(schema: Any) -> type[BaseModel]:
    """The model that validates a section. The keys are aliases of fields, whose names are none of pydantic's."""
    members: dict[str, Any] = {}
    for name, hint in hints_of(schema).items():
        meta = PLAIN | dict(next(f for f in fields(schema) if f.name == name).metadata)
        if name in PLACES:
            meta["valid"] = lambda path: None if path.strip() else "a path"
        members[f"key_{name}"] = (_validated_type(hint, meta), Field(None, alias=name))
    return create_model(schema.__name__, __config__=_CONFIG, **members)


def _validated_type(hint: Any, meta: dict[str, Any]) -> Any:
    """The type by which pydantic validates a value of this type with the constraints of `arg`."""
    if bare(hint) is not hint:
        return _validated_type(bare(hint), meta) | None
    arguments, after = get_args(hint), AfterValidator(partial(_within_bounds, meta))
    if is_section(hint):
        return _section_model(hint)
    if get_origin(hint) is list:
        elements: Any = _validated_type(arguments[0], PLAIN | {"limits": meta["each"]})
        return Annotated[list[elements], BeforeValidator(partial(_converted_value, meta["single"])), after]
    if get_origin(hint) is dict and arguments[1] is not Any:
        values: Any = _validated_type(arguments[1], PLAIN)
        return Annotated[dict[str, values], after]
    if hint in (int, float):
        limits = {"ge": -MOST} | ({} if "lt" in meta["limits"] else {"le": MOST}) | meta["limits"]
        options: dict[str, Any] = {"allow_inf_nan": False} if hint is float else {}
        for name, limit in limits.items():
            options[name] = hint(limit)
        return Annotated[hint, Field(strict=True, **options), BeforeValidator(partial(_converted_value, hint)), after]
    return Annotated[hint, BeforeValidator(partial(_converted_value, hint)), after]


def _converted_value(kind: Any, value: Any) -> Any:
    """The value, converted to `kind` if a file may write it otherwise: the text of a number, as of an environment
    variable, an integer, or a name of digits. A text as `kind` is a regular expression of texts that are lists of one.
    """
    if isinstance(kind, str):
        return [value] if isinstance(value, str) and re.fullmatch(kind, value) else value
    if kind is str:
        return str(value) if isinstance(value, int | float) else value
    if (kind in (int, float) and isinstance(value, str)) or (kind is float and type(value) is int):
        with suppress(ValueError, OverflowError):
            return kind(value)
    return value


def _within_bounds(meta: dict[str, Any], value: Any) -> Any:
    """The value. Raises pydantic's error for one that the constraints of `arg` exclude."""
    choices, forms = meta["choices"], meta["forms"]
    if choices == DTYPES and value in FLOAT16:
        raise _Wrong(NO_FLOAT16)
    if choices and value not in choices and not (forms and ":" in value):
        raise _Wrong(f"one of {', '.join((*choices, *forms))}", near=nearest(value, choices))
    words = meta["valid"](_valid_leaves(value)) if meta["valid"] is not None else None
    if words is not None:
        raise _Wrong(words)
    return _valid_leaves(value)


def _valid_leaves(value: Any, at: str = "") -> Any:
    """Check the texts and numbers in a free-form value, such as the arguments of a reward."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        _valid_leaves(item, f"{at}[{name}]" if isinstance(value, list) else f"{at}.{name}")
    if isinstance(value, str) and _CONTROL.search(value):
        raise _Wrong("text in UTF-8 without control characters", at=at, value=value)
    if isinstance(value, float) and not isfinite(value):
        raise _Wrong("a finite number", at=at, value=value)
    return value


# --- messages


def _error_line(schema: Any, values: Any, error: Any) -> str:
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
    at = near = ""
    if error["type"] == "value_error":
        wrong: _Wrong = context["error"]
        words, at, near, value = wrong.words, wrong.at, wrong.near, wrong.value if wrong.at else error["input"]
    elif error["type"] in LIMITS:
        (limit,), value = context.values(), error["input"]
        words = f"{LIMITS[error['type']]} {limit:g}"
    elif error["type"] == "finite_number":
        words, value = "a finite number", error["input"]
    elif is_section(bare(hint)):
        form = "a section" if bare(hint) is hint else "a section, true or false"
        return f"{key}: expected {form}, got {shown(value)}; its keys: {', '.join(hints_of(bare(hint)))}"
    else:
        text = value if re.fullmatch(r"[\w.-]*", str(value)) else json.dumps(value, ensure_ascii=False)
        example = f"; write [{text}]" if type(value) is element_of(hint) else ""
        return f"{key}: expected {expected(hint)}, got {shown(value)}{example}"
    for part in rest:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"{key}{at}: expected {words}, got {cut(repr(value))}{near}"
