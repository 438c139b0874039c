"""The types that JSON schemas of tools allow for arguments, for formats of calls that write arguments as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

# names of types that are not JSON schema's, in schemas written by hand
_NAMES = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object"}
_NAMES |= {"list": "array"}
_Known = dict[str, frozenset[str]]  # by reference


class Parameters(NamedTuple):
    """The types of a tool's arguments by name, and those of all others. A type is a name of JSON schema's, or a text of
    an enumeration in quotation marks; none means any value.
    """

    named: Mapping[str, frozenset[str]]
    others: frozenset[str] = frozenset()

    def of(self, name: str) -> frozenset[str]:
        return self.named.get(name, self.others)


UNKNOWN = Parameters({})  # of a tool without a schema
Types = Mapping[str, Parameters]  # by the tool's name


def argument_types(tools: Sequence[dict[str, Any]]) -> Types:
    """The types of all tools' arguments, from their schemas in OpenAI's format."""
    types = {}
    for tool in tools:
        function = tool.get("function", tool)
        types[function["name"]] = parameter_types(function.get("parameters"))
    return types


def parameter_types(root: Any) -> Parameters:
    """The types of the properties of an object, by its schema."""
    named: dict[str, frozenset[str]] = {}
    others: frozenset[str] = frozenset()
    known: _Known = {}
    for schema in _merged_schemas(root, root, set()):
        properties = schema.get("properties")
        for name, each in properties.items() if isinstance(properties, dict) else ():
            allowed, before = _allowed_types(each, root, known), named.get(name)
            named[name] = allowed if before is None else allowed and before and allowed | before
        others = others or _allowed_types(schema.get("additionalProperties"), root, known)
    return Parameters(named, others)


def _allowed_types(schema: Any, root: Any, known: _Known) -> frozenset[str]:
    """The types that a schema allows; none if it allows any, or cannot be read. root: where its references begin."""
    if not isinstance(schema, dict):
        return frozenset()
    parts = [_listed_types(schema.get("type")), _enum_types(schema)]
    if not parts[0]:
        parts.append(frozenset({"object"} if "properties" in schema else {"array"} if "items" in schema else ()))
    if "$ref" in schema:
        name = str(schema["$ref"])
        if name not in known:
            known[name] = frozenset()  # where a reference leads back to itself
            known[name] = _allowed_types(_resolve_reference(name, root), root, known)
        parts.append(known[name])
    for key in ("anyOf", "oneOf"):
        choices: frozenset[str] = frozenset()
        for each in _as_list(schema.get(key)):
            choices |= _allowed_types(each, root, known)
        parts.append(choices)
    for each in _as_list(schema.get("allOf")):
        parts.append(_allowed_types(each, root, known))
    types: frozenset[str] = frozenset()
    for part in parts:
        types = _common_types(types, part) if types and part else types or part
    return types | {"null"} if schema.get("nullable") is True else types


def _common_types(first: frozenset[str], second: frozenset[str]) -> frozenset[str]:
    """The types that both sets allow; those of the first if they contradict each other."""
    kept = set()
    for some, others in ((first, second), (second, first)):
        for kind in some:
            if kind in others or _wider_type(kind) in others:
                kept.add(kind)
    return frozenset(kept) or first


def _wider_type(kind: str) -> str:
    """The type that includes another one."""
    return "string" if kind.startswith('"') else "number" if kind == "integer" else kind


def _listed_types(kind: Any) -> frozenset[str]:
    names = set()
    for name in [kind] if isinstance(kind, str) else _as_list(kind):
        if isinstance(name, str):
            names.add(_NAMES.get(name.lower(), name.lower()))
    return frozenset(names)


def _enum_types(schema: dict[str, Any]) -> frozenset[str]:
    """The types of the values of an enumeration or a constant."""
    kinds = {bool: "boolean", int: "integer", float: "number", type(None): "null", dict: "object", list: "array"}
    types = set()
    for value in [*_as_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        types.add(json.dumps(value) if isinstance(value, str) else kinds[type(value)])
    return frozenset(types)


def _merged_schemas(schema: Any, root: Any, seen: set[str]) -> list[dict[str, Any]]:
    """A schema, and all those that it refers to, joins, or chooses from."""
    if not isinstance(schema, dict):
        return []
    schemas = [schema]
    name = schema.get("$ref")
    if isinstance(name, str) and name not in seen:
        seen.add(name)
        schemas += _merged_schemas(_resolve_reference(name, root), root, seen)
    for key in ("allOf", "anyOf", "oneOf"):
        for each in _as_list(schema.get(key)):
            schemas += _merged_schemas(each, root, seen)
    return schemas


def _resolve_reference(name: str, root: Any) -> Any:
    """The part of a schema that a reference within it, such as #/$defs/Point, points to; None if there is none."""
    value = root
    for part in filter(None, name.removeprefix("#").split("/")):
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = dict(enumerate(value)).get(int(key)) if key.isdecimal() else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
