"""Calls of tools in what a language model wrote, by the format in which its model family writes them.

The parsers read each character a fixed number of times, and a call that is malformed makes an `error` of one line in
place of an exception: a policy may write anything. `parse_response` of transformers raises at the first malformed call,
and reads a description of the format that few model folders have.
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

# The message {role, content} of a text, with `tool_calls` where there are any, `reasoning_content` where the text
# begins with thoughts, and `error` where a call is malformed: one line on the first of these.
Parser = Callable[[str], dict[str, Any]]
_TAG = "<|python_tag|>"
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_ARGUMENT = re.compile(r"<arg_key>([^<>\n]*)</arg_key>\s*<arg_value>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_QUOTE = '<|"|>'
_KEY = re.compile(r'([{,]\s*+)([^\s{}\[\],:"]++)\s*+:')


class CallError(ValueError):
    """A call that is malformed; the message is a part of a line."""


def parser(format: str, tools: Sequence[dict[str, Any]] = ()) -> Parser:
    """The parser of `environment.format`: a name of FORMATS, or a function of the user's own that returns such a
    message, or raises ValueError for a malformed call. `tools` are their schemas, for formats that write all arguments
    as texts. Raises ConfigError for a format that is unknown.
    """
    if ":" in format:
        return _of_user(resolve_object(format, "environment.format", "function"), format)
    if format not in FORMATS:
        near = nearest(format, list(FORMATS)) or ";"
        known = f"known: {', '.join(FORMATS)}, {object_forms('function')}"
        raise ConfigError(f"environment.format={format!r} is unknown{near} {known}")
    types = _types(tools)
    return lambda text: _message(text, FORMATS[format], types)


class _Parts:
    """The parts of a text: its calls, what is wrong with some, and the rest."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: str | None = None  # of the first that is malformed
        self.rest: list[str] = []
        self.thoughts: list[str] = []

    def add(self, text: str, read: Callable[[str], dict[str, Any]]) -> None:
        """Read a call."""
        try:
            self.calls.append(read(text))
        except ValueError as error:
            self.error = self.error or _problem(error)


Types = dict[str, dict[str, set[str]]]  # of arguments, by the tool's name


class Format(NamedTuple):
    """A form of calls, and the tags around thoughts, or empty ones where `read` finds the thoughts itself."""

    read: Callable[[str, Types], _Parts]
    think: str = "<think>"
    thought: str = "</think>"


def _message(text: str, format: Format, types: Types) -> dict[str, Any]:
    """The message of a text. A call among thoughts is none."""
    thoughts, answer = "", text
    if format.thought and format.thought in text:
        thoughts, _, answer = text.partition(format.thought)
    elif format.think and text.lstrip().startswith(format.think):  # the template may have begun the thoughts
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
    text: str, read: Callable[[str], dict[str, Any]], opening: str = "<tool_call>", closing: str = "</tool_call>"
) -> _Parts:
    """Calls between tags; a turn may end without the last closing one."""
    parts, place = _Parts(), 0
    while (start := text.find(opening, place)) >= 0:
        parts.rest.append(text[place:start])
        end = text.find(closing, start)
        end = end if end >= 0 else len(text)
        body = text[start + len(opening) : end].strip()
        parts.add(body, read)
        place = end + len(closing)
    parts.rest.append(text[place:])
    return parts


def _hermes(text: str, types: Types) -> _Parts:
    """JSON objects between tags: Hermes, Qwen2.5 and Qwen3."""
    return _tagged(text, lambda body: _call(parse_json(body), "arguments"))


def _qwen3_coder(text: str, types: Types) -> _Parts:
    """A function between tags, with a tag for each argument, whose text may have lines: Qwen3-Coder, Qwen3.5 and later.

    Arguments have the types of the tool's schema; what is of none stays a text.
    """
    return _tagged(text, lambda body: _function(body, types))


def _llama3(text: str, types: Types) -> _Parts:
    """A text that is one JSON object, or several behind semicolons: Llama 3.1 to 3.3."""
    parts, (before, tag, rest) = _Parts(), text.partition(_TAG)
    body = (rest if tag else text).strip()
    if not tag and not (body.startswith("{") and '"name"' in body):
        parts.rest.append(text)
        return parts
    parts.rest.append(before if tag else "")
    for part in _objects(body):
        parts.add(part, lambda text: _call(parse_json(text), "parameters"))
    return parts


def _glm45(text: str, types: Types) -> _Parts:
    """A name between tags, with two pairs of tags for each argument, typed by the tool's schema: GLM-4.5 and later."""
    return _tagged(text, lambda body: _keyed(body, types))


def _gpt_oss(text: str, types: Types) -> _Parts:
    """Messages of channels, those of analysis being thoughts, and JSON for the function that is a message's recipient:
    harmony.
    """
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


def _gemma4(text: str, types: Types) -> _Parts:
    """A name with an object that has a token in the place of quotation marks, and keys without any: Gemma 4."""
    return _tagged(text, _braced, "<|tool_call>", "<tool_call|>")


FORMATS: dict[str, Format] = {
    "hermes": Format(_hermes),
    "qwen3_coder": Format(_qwen3_coder),
    "llama3": Format(_llama3),
    "glm45": Format(_glm45),
    "gpt_oss": Format(_gpt_oss, "", ""),
    "gemma4": Format(_gemma4, "<|channel>thought", "<channel|>"),
}


def _call(value: Any, arguments: str) -> dict[str, Any]:
    """A call of a JSON value {name, arguments}."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError(f"expected a JSON object with a name and {arguments}")
    given = value.get(arguments, value.get("arguments", {}))
    if isinstance(given, str):
        given = parse_json(given)
    if not isinstance(given, dict):
        raise CallError(f"the {arguments} should be a JSON object")
    return {"name": value["name"], "arguments": given}


def _function(body: str, types: Types) -> dict[str, Any]:
    """A call `<function=name>` with `<parameter=name>` each."""
    head, closed, rest = body.partition(">")
    name = head.removeprefix("<function=").strip()
    if not closed or not head.startswith("<function=") or not name:
        raise CallError("expected <function=name> behind <tool_call>")
    arguments: dict[str, Any] = {}
    for key, text in _texts(rest, "<parameter=", _PARAMETER, "</parameter>").items():
        text = text.removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(text, types.get(name, {}).get(key, set()))
    return {"name": name, "arguments": arguments}


def _keyed(body: str, types: Types) -> dict[str, Any]:
    """A call of a name, with `<arg_key>name</arg_key><arg_value>` each."""
    head, tag, rest = body.partition("<arg_key>")
    name = head.strip()
    if not name:
        raise CallError("expected the name of a function behind <tool_call>")
    arguments: dict[str, Any] = {}
    for key, text in _texts(tag + rest, "<arg_key>", _ARGUMENT, "</arg_value>").items():
        arguments[key] = _typed(text, types.get(name, {}).get(key, set()))
    return {"name": name, "arguments": arguments}


def _texts(body: str, head: str, opening: re.Pattern[str], closing: str) -> dict[str, str]:
    """The texts between tags, by the names that the opening ones have; they begin with `head`."""
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
            raise CallError(f"no {closing} behind {tag[0]}")
        texts[tag[1].strip()] = body[tag.end() : end]
        place = end


def _received(name: str, body: str) -> dict[str, Any]:
    """A call of a function that JSON is sent to."""
    return _call({"name": name, "arguments": parse_json(body)}, "arguments")


def _braced(body: str) -> dict[str, Any]:
    """A call `call:name{key:value}`, whose texts are between tokens that stand for quotation marks."""
    head, brace, rest = body.partition("{")
    name = head.removeprefix("call:").strip()
    if not brace or not head.startswith("call:") or not name:
        raise CallError("expected call:name{...} behind <|tool_call>")
    pieces = (brace + rest).split(_QUOTE)
    for place, piece in enumerate(pieces):
        pieces[place] = json.dumps(piece) if place % 2 else _KEY.sub(r'\1"\2":', piece)
    return _call({"name": name, "arguments": parse_json("".join(pieces))}, "arguments")


def _types(tools: Sequence[dict[str, Any]]) -> Types:
    """The types of arguments, by tool."""
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
    """An argument of these types; a text where there are none, and where it is not of them."""
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
    """JSON objects one behind another, apart by semicolons and space; what is none comes whole, as the last."""
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
    """The parser of a user's function."""

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
