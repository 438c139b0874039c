"""Parsers of tool calls in a language model's output, by the format of its model family.

A policy may write anything, so the parsers take linear time, and a malformed call gives a one-line `error` instead of
an exception. transformers' `parse_response` raises at the first malformed call, and needs a description of the format
that few model folders have.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from phalanx.config.files import parse_json
from phalanx.config.messages import ConfigError, cut, nearest, reason
from phalanx.config.registry import object_forms, resolve_object
from phalanx.types import JobError

# A parser maps a text to a message {role, content}, with `tool_calls` if it has any, `reasoning_content` if it begins
# with thoughts, and `error`, one line on the first malformed call, if one is malformed.
Parser = Callable[[str], dict[str, Any]]
_TAG = "<|python_tag|>"
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_ARGUMENT = re.compile(r"<arg_key>([^<>\n]*)</arg_key>\s*<arg_value>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_QUOTE = '<|"|>'
_KEY = re.compile(r'([{,]\s*+)([^\s{}\[\],:"]++)\s*+:')


class CallError(ValueError):
    """A malformed call; the message is part of a line."""


def parser(format: str, tools: Sequence[dict[str, Any]] = ()) -> Parser:
    """The parser of `environment.format`. Raises ConfigError for an unknown format.

    format: a name in FORMATS, or the user's own function, which returns such a message or raises ValueError for a
    malformed call. tools: schemas of the tools, for formats that write all arguments as plain text.
    """
    if ":" in format:
        read = resolve_object(format, "environment.format", "function")
        if not callable(read):
            raise ConfigError(f"environment.format={format!r} is of type {type(read).__name__}; expected a function")
        return _of_user(read, format)
    if format not in FORMATS:
        near = nearest(format, list(FORMATS)) or ";"
        known = f"known: {', '.join(FORMATS)}, {object_forms('function')}"
        raise ConfigError(f"environment.format={format!r} is unknown{near} {known}")
    types = _types(tools)
    return lambda text: _message(text, FORMATS[format], types)


class _Parts:
    """The parts of a text: its calls, thoughts, and the remaining text."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: str | None = None  # that of the first malformed call
        self.rest: list[str] = []
        self.thoughts: list[str] = []

    def add(self, text: str, read: Callable[[str], dict[str, Any]]) -> None:
        """Parse a call by `read`, and keep it or its error."""
        try:
            self.calls.append(read(text))
        except ValueError as error:
            self.error = self.error or _problem(error)


Types = dict[str, dict[str, set[str]]]  # JSON types of arguments: tool's name -> argument's name -> types


class Format(NamedTuple):
    """A format of calls, and the tags around thoughts, which are empty if `read` finds the thoughts itself."""

    read: Callable[[str, Types], _Parts]
    think: str = "<think>"
    thought: str = "</think>"


def _message(text: str, format: Format, types: Types) -> dict[str, Any]:
    """The message of a text. Calls within thoughts are ignored."""
    thoughts, answer = "", text
    if format.thought and format.thought in text:  # the opening tag may be in the prompt
        thoughts, _, answer = text.partition(format.thought)
    elif format.think and text.lstrip().startswith(format.think):
        thoughts, answer = text, ""
    parts = format.read(answer, types)
    thoughts = thoughts or "\n".join(parts.thoughts)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(parts.rest).strip()}
    if thoughts:
        message["reasoning_content"] = thoughts.strip().removeprefix(format.think).strip()
    if parts.calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in parts.calls]
    if parts.error is not None:
        message["error"] = parts.error
    return message


def _tagged(
    read: Callable[[str, Types], dict[str, Any]], opening: str = "<tool_call>", closing: str = "</tool_call>"
) -> Callable[[str, Types], _Parts]:
    """The `read` of a Format with calls between tags; the last closing tag may be missing at the end of a turn."""

    def parts_of(text: str, types: Types) -> _Parts:
        parts, place = _Parts(), 0
        while (start := text.find(opening, place)) >= 0:
            parts.rest.append(text[place:start])
            end = text.find(closing, start)
            end = end if end >= 0 else len(text)
            body = text[start + len(opening) : end].strip()
            parts.add(body, lambda body: read(body, types))
            place = end + len(closing)
        parts.rest.append(text[place:])
        return parts

    return parts_of


def _llama3(text: str, types: Types) -> _Parts:
    """Llama 3.1 to 3.3: a text that is one JSON object, or several separated by semicolons."""
    parts, (before, tag, rest) = _Parts(), text.partition(_TAG)
    body = (rest if tag else text).strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        parts.rest.append(text)
        return parts
    parts.rest.append(before if tag else "")
    for part in _objects(body):
        parts.add(part, lambda text: _call(parse_json(text), "parameters"))
    return parts


def _gpt_oss(text: str, types: Types) -> _Parts:
    """gpt-oss (harmony): messages in channels, with thoughts in `analysis`, and JSON in messages to a function."""
    parts = _Parts()
    for piece in text.split("<|start|>assistant"):
        head, opened, body = piece.partition("<|message|>")
        body = _ENDS.split(body, maxsplit=1)[0]
        recipient = _RECIPIENT.search(head)
        if not opened:
            parts.rest.append(head)
        elif recipient is not None:
            parts.add(body, partial(_received, recipient[1]))
        elif "analysis" in head:
            parts.thoughts.append(body)
        else:
            parts.rest.append(body)
    return parts


def _call(value: Any, arguments: str) -> dict[str, Any]:
    """The call in a JSON value {name, arguments}; `arguments` is their key."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError(f"expected a JSON object with a name and {arguments}")
    given = value.get(arguments, value.get("arguments", {}))
    if isinstance(given, str):
        given = parse_json(given)
    if not isinstance(given, dict):
        raise CallError(f"the {arguments} should be a JSON object")
    return {"name": value["name"], "arguments": given}


def _json_call(body: str, types: Types) -> dict[str, Any]:
    """Hermes, Qwen2.5 and Qwen3: a JSON object."""
    return _call(parse_json(body), "arguments")


def _function(body: str, types: Types) -> dict[str, Any]:
    """Qwen3-Coder, Qwen3.5 and later: a call `<function=name>` with a `<parameter=name>` for each argument.

    Arguments may have several lines. They have the types of the tool's schema; those without a type remain text.
    """
    head, closed, rest = body.partition(">")
    name = head.removeprefix("<function=").strip()
    if not closed or not head.startswith("<function=") or not name:
        raise CallError("expected <function=name> after <tool_call>")
    texts = _texts(rest, "<parameter=", _PARAMETER, "</parameter>")
    for key, text in texts.items():
        texts[key] = text.removeprefix("\n").removesuffix("\n")
    return _typed_call(name, texts, types)


def _keyed(body: str, types: Types) -> dict[str, Any]:
    """GLM-4.5 and later: a name, with `<arg_key>name</arg_key><arg_value>` for each argument, typed by the schema."""
    head, tag, rest = body.partition("<arg_key>")
    name = head.strip()
    if not name:
        raise CallError("expected the name of a function after <tool_call>")
    return _typed_call(name, _texts(tag + rest, "<arg_key>", _ARGUMENT, "</arg_value>"), types)


def _typed_call(name: str, texts: dict[str, str], types: Types) -> dict[str, Any]:
    """A call with arguments given as text, converted to the types in the tool's schema."""
    kinds = types.get(name, {})
    return {"name": name, "arguments": {key: _typed(text, kinds.get(key, set())) for key, text in texts.items()}}


def _texts(body: str, head: str, opening: re.Pattern[str], closing: str) -> dict[str, str]:
    """The texts between tags, by the names in the opening tags, which begin with `head`."""
    texts: dict[str, str] = {}
    place = 0
    while True:
        tag = opening.search(body, place)
        if head in body[place : len(body) if tag is None else tag.start()]:
            raise CallError(f"malformed {head}")
        if tag is None:
            return texts
        end = body.find(closing, tag.end())
        if end < 0:
            raise CallError(f"no {closing} after {tag[0]}")
        texts[tag[1].strip()] = body[tag.end() : end]
        place = end


def _received(name: str, body: str) -> dict[str, Any]:
    """The call of a function that is the recipient of JSON."""
    return _call({"name": name, "arguments": parse_json(body)}, "arguments")


def _braced(body: str, types: Types) -> dict[str, Any]:
    """Gemma 4: a call `call:name{key:value}`, with unquoted keys, and a token in place of quotation marks."""
    head, brace, rest = body.partition("{")
    name = head.removeprefix("call:").strip()
    if not brace or not head.startswith("call:") or not name:
        raise CallError("expected call:name{...} after <|tool_call>")
    pieces = (brace + rest).split(_QUOTE)
    for place, piece in enumerate(pieces):
        pieces[place] = json.dumps(piece) if place % 2 else _KEY.sub(r'\1"\2":', piece)
    return _call({"name": name, "arguments": parse_json("".join(pieces))}, "arguments")


FORMATS: dict[str, Format] = {
    "hermes": Format(_tagged(_json_call)),
    "qwen3_coder": Format(_tagged(_function)),
    "llama3": Format(_llama3),
    "glm45": Format(_tagged(_keyed)),
    "gpt_oss": Format(_gpt_oss, "", ""),
    "gemma4": Format(_tagged(_braced, "<|tool_call>", "<tool_call|>"), "<|channel>thought", "<channel|>"),
}


def _types(tools: Sequence[dict[str, Any]]) -> Types:
    """The types of all tools' arguments."""
    types: Types = {}
    for tool in tools:
        function = tool.get("function", tool)
        schemas = function.get("parameters", {}).get("properties", {})
        types[function["name"]] = {name: _kinds(schema) for name, schema in schemas.items()}
    return types


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types that a JSON schema allows."""
    listed = schema.get("type", [])
    kinds = {listed} if isinstance(listed, str) else set(listed)
    if schema.get("nullable"):
        kinds.add("null")
    for choice in schema.get("anyOf", []):
        kinds |= _kinds(choice)
    return kinds


def _typed(text: str, kinds: set[str]) -> Any:
    """Convert an argument to one of these types; it remains text if there are none, or if it has another type."""
    word = text.strip()
    if "null" in kinds and word in ("null", "None"):
        return None
    if not kinds or "string" in kinds:
        return text
    try:
        return parse_json(word.lower() if word in ("True", "False") else word)
    except ValueError:
        return text


def _objects(text: str) -> list[str]:
    """Split JSON objects separated by semicolons or whitespace; from the first invalid one, the text is one part."""
    parts: list[str] = []
    place, decoder = 0, json.JSONDecoder()
    while place < len(text):
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return [*parts, text[place:]]
        parts.append(text[place:end])
        place = end
        while place < len(text) and text[place] in "; \t\r\n":
            place += 1
    return parts


def _problem(error: ValueError) -> str:
    return f"malformed call: {cut(' '.join(str(error).split()))}"


def _of_user(read: Callable[[str], Any], path: str) -> Parser:
    """The parser that calls the user's function `read`."""

    def parse(text: str) -> dict[str, Any]:
        try:
            message = read(text)
        except ValueError as error:
            return {"role": "assistant", "content": text, "error": _problem(error)}
        except Exception as error:  # whatever the user's code raises
            raise JobError(f"environment.format={path!r} raised {reason(error)}") from error
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise JobError(
                f"environment.format={path!r} returned {type(message).__name__}; expected a message {{role, content}}, "
                "with tool_calls where the text has any"
            )
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list) or not all(map(_is_call, calls)):
            raise JobError(
                f"environment.format={path!r} returned the tool_calls {cut(repr(calls))}; expected a list of "
                "{type: function, function: {name, arguments}}"
            )
        return {"role": "assistant", **message}

    return parse


def _is_call(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function
