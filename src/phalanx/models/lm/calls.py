"""Parsers of tool calls in a language model's output, by the format of its model family.

A policy may write anything, so the parsers take linear time, and a malformed call gives a one-line `error` instead of
an exception. transformers' `parse_response` raises at the first malformed call, and needs a description of the format
that few model folders have.
"""

import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from phalanx.config.files import parse_json
from phalanx.config.messages import ConfigError, cut, nearest, reason
from phalanx.config.registry import object_forms, resolve_object
from phalanx.models.lm.schemas import UNKNOWN, Types, argument_types
from phalanx.types import JobError

# A parser maps the text of a turn, and the end of the text before it, to a message {role, content}, with `tool_calls`
# if it has any, `reasoning_content` if it has thoughts, and `error`, one line on the first malformed call, if one is.
Parser = Callable[..., dict[str, Any]]
# tags around thoughts; a turn may use those of another family, and the text before it may have opened them
_THOUGHTS = {
    "<think>": "</think>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<|open|>think<|sep|>": "<|close|>think<|sep|>",
}
_OPENED = re.compile(f"(?:{'|'.join(map(re.escape, _THOUGHTS))})\\s*\\Z")
_TAG = "<|python_tag|>"
_START = "<|start|>assistant"
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_ARGUMENT = re.compile(r"<arg_key>([^<>\n]*)</arg_key>\s*<arg_value>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_QUOTE = '<|"|>'
_CALL_KEYS = {"name", "id", "type"}  # beside the arguments
# a text in quotation marks, or a key of an object without them
_KEY = re.compile(r'"(?:[^"\\]|\\.)*+"?|([{,]\s*+)([^\s{}\[\],:"]++)\s*+:', re.DOTALL)
_parse_value = partial(parse_json, finite=True)  # servers of tools take no NaN, which Python's JSON has


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
    types = argument_types(tools)
    return lambda text, before="": _parse_message(text, before, FORMATS[format], types)


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
            self.error = self.error or _describe_error(error)


class Format(NamedTuple):
    """A format of calls, and the tags around its thoughts, which are empty if `read` finds all thoughts itself."""

    read: Callable[[str, Types], _Parts]
    think: str = "<think>"
    thought: str = "</think>"


def _parse_message(text: str, before: str, format: Format, types: Types) -> dict[str, Any]:
    """The message of a text. Calls within thoughts are ignored, also if the text before has opened these."""
    closing = ""
    if not format.think:
        text = before.rpartition(_START)[2] + text if _START in before else text
    elif (opened := _OPENED.search(before)) is not None:
        closing = _THOUGHTS[opened[0].rstrip()]
    else:
        closing = next((close for tag, close in _THOUGHTS.items() if text.lstrip().startswith(tag)), "")
        if not closing and format.thought in text and not _is_argument(format, text, types):
            closing = format.thought
    thoughts, _, answer = text.partition(closing) if closing else ("", "", text)
    parts = format.read(answer, types)
    tag = next((tag for tag in _THOUGHTS if thoughts.strip().startswith(tag)), "")
    every = [thoughts.strip().removeprefix(tag)] * bool(thoughts) + parts.thoughts
    message: dict[str, Any] = {"role": "assistant", "content": "".join(parts.rest).strip()}
    if any(every) or thoughts:
        message["reasoning_content"] = "\n".join(map(str.strip, every)).strip()
    if parts.calls:
        message["tool_calls"] = []
        for call in parts.calls:
            written = {"id": call.pop("id")} if "id" in call else {}
            message["tool_calls"].append({"type": "function", **written, "function": call})
    if parts.error is not None:
        message["error"] = parts.error
    return message


def _is_argument(format: Format, text: str, types: Types) -> bool:
    """Whether the first tag that ends thoughts, which nothing opened, is within a call, which is complete with it."""
    head = text.partition(format.thought)[0]
    return format.read(head, types).error is not None and format.read(text, types).error is None


def _split_tags(text: str, opening: str, closing: str | None) -> Iterator[tuple[str, str]]:
    """Split a text into (opening tag, body): calls, thoughts, and the texts between them, whose tag is empty. Without
    its closing tag, or with None, a body reaches to the end. Within a line, a tag of thoughts is text.
    """
    tags, place, searched = {opening: closing, **_THOUGHTS}, 0, 0
    tag = re.compile("|".join(map(re.escape, tags)))
    while (start := tag.search(text, searched)) is not None:
        at, searched = start.span()
        if start[0] != opening and at != place and text[at - 1] != "\n":
            continue
        yield "", text[place:at]
        close = tags[start[0]]
        end = text.find(close, searched) if close is not None else -1
        end = end if end >= 0 else len(text)
        yield start[0], text[searched:end].strip()
        place = searched = end + len(close or "")
    yield "", text[place:]


def _tagged_calls(
    read: Callable[[str, Types], dict[str, Any]], opening: str = "<tool_call>", closing: str = "</tool_call>"
) -> Callable[[str, Types], _Parts]:
    """The `read` of a Format with calls between tags; the last closing tag may be missing at the end of a turn."""

    def parts_of(text: str, types: Types) -> _Parts:
        parts = _Parts()
        for tag, body in _split_tags(text, opening, closing):
            if tag == opening:
                parts.add(body, lambda body: read(body, types))
            else:
                (parts.thoughts if tag else parts.rest).append(body)
        if not parts.calls and text.rstrip().endswith(closing):
            parts.error = parts.error or _describe_error(CallError(f"no {opening} before {closing}"))
        return parts

    return parts_of


def _read_llama3(text: str, types: Types) -> _Parts:
    """Llama 3.1 to 3.3: a text that is one JSON object, or several separated by semicolons.

    Without the tag that begins a call, an object is one only if it has a name and parameters: other JSON is an answer.
    """
    parts, bare = _Parts(), _TAG not in text
    pieces = _split_tags(text, _TAG, None)
    if bare:
        called = _looks_called("".join(_split_objects(text.strip())[:1]))
        pieces = iter([(_TAG, text.strip()) if called else ("", text)])
    for tag, piece in pieces:
        if tag == _TAG:
            for body in _split_objects(piece):
                parts.add(body, lambda body: _check_call(_parse_value(body), "parameters", required=bare))
        else:
            (parts.thoughts if tag else parts.rest).append(piece)
    return parts


def _looks_called(text: str) -> bool:
    """Whether a text is a JSON object of a call; a malformed one is if it has the keys of a call."""
    if not text.startswith("{"):
        return False
    try:
        value = parse_json(text)
    except ValueError:
        return '"name"' in text and ('"parameters"' in text or '"arguments"' in text)
    known = value.keys() <= {*_CALL_KEYS, "parameters", "arguments"}
    return known and isinstance(value.get("name"), str) and not {"parameters", "arguments"}.isdisjoint(value)


def _gpt_oss(text: str, types: Types) -> _Parts:
    """gpt-oss (harmony): messages in channels, with thoughts in `analysis`, and JSON in messages to a function."""
    parts = _Parts()
    for piece in text.split(_START):
        head, opened, body = piece.partition("<|message|>")
        body = _ENDS.split(body, maxsplit=1)[0]
        recipient = _RECIPIENT.search(head)
        if not opened:
            parts.rest.append(head)
        elif recipient is not None:
            parts.add(body, partial(_received_call, recipient[1]))
        elif "analysis" in head:
            parts.thoughts.append(body)
        else:
            parts.rest.append(body)
    return parts


def _check_call(value: Any, arguments: str, *, required: bool = False) -> dict[str, Any]:
    """The call in a JSON value {name, arguments}, with its `id` if it has one; `arguments` is the key of the arguments,
    which a call without any lacks unless they are `required`. They are not beside the name, or under another key.
    """
    named = isinstance(value, dict) and isinstance(value.get("name"), str)
    if not named or ({arguments, "arguments"}.isdisjoint(value) and (required or not value.keys() <= _CALL_KEYS)):
        raise CallError(f"expected a JSON object with a name and {arguments}")
    given = value.get(arguments, value.get("arguments", {}))
    if isinstance(given, str):
        given = _parse_value(given)
    if not isinstance(given, dict):
        raise CallError(f"the {arguments} should be a JSON object")
    return {"name": value["name"], "arguments": given} | (
        {"id": value["id"]} if isinstance(value.get("id"), str) else {}
    )


def _json_call(body: str, types: Types) -> dict[str, Any]:
    """Hermes, Qwen2.5 and Qwen3: a JSON object."""
    return _check_call(_parse_value(body), "arguments")


def _parse_function(body: str, types: Types) -> dict[str, Any]:
    """Qwen3-Coder, Qwen3.5 and later: a call `<function=name>` with a `<parameter=name>` for each argument.

    Arguments may have several lines. They have the types of the tool's schema; those without a type remain text.
    """
    head, closed, rest = body.partition(">")
    name = head.removeprefix("<function=").strip()
    if not closed or not head.startswith("<function=") or not name:
        raise CallError("expected <function=name> after <tool_call>")
    texts = _argument_texts(rest, "<parameter=", _PARAMETER, "</parameter>", types.get(name, UNKNOWN).named)
    for key, text in texts.items():
        texts[key] = text.removeprefix("\n").removesuffix("\n")
    return _typed_call(name, texts, types)


def _parse_keyed(body: str, types: Types) -> dict[str, Any]:
    """GLM-4.5 and later: a name, with `<arg_key>name</arg_key><arg_value>` for each argument, typed by the schema."""
    head, tag, rest = body.partition("<arg_key>")
    name = head.strip()
    if not name:
        raise CallError("expected the name of a function after <tool_call>")
    texts = _argument_texts(tag + rest, "<arg_key>", _ARGUMENT, "</arg_value>", types.get(name, UNKNOWN).named)
    return _typed_call(name, texts, types)


def _typed_call(name: str, texts: dict[str, str], types: Types) -> dict[str, Any]:
    """A call with arguments given as text, converted to the types in the tool's schema."""
    kinds = types.get(name, UNKNOWN)
    return {"name": name, "arguments": {key: _convert_argument(text, kinds.of(key)) for key, text in texts.items()}}


def _argument_texts(
    body: str, head: str, opening: re.Pattern[str], closing: str, known: Container[str]
) -> dict[str, str]:
    """The texts between tags, by the names in the opening tags, which begin with `head`.

    A text without its closing tag ends where the next argument begins: an opening tag at the start of a line, or one
    with the name of a parameter that is `known`. Other opening tags within a text belong to it.
    """
    texts: dict[str, str] = {}
    place, either = 0, re.compile(f"{opening.pattern}|{closing}")
    while True:
        tag = opening.search(body, place)
        between = body[place : len(body) if tag is None else tag.start()]
        if head in between:
            raise CallError(f"malformed {head}")
        if "<tool_call>" in between or "<function=" in between:
            raise CallError("it has another call within it; expected </tool_call> before the next one")
        if outside := between.replace(closing, "").replace("</function>", "").strip():
            raise CallError(f"{cut(repr(outside), 40)} is outside the arguments; expected {head}")
        if tag is None:
            return texts
        for end in either.finditer(body, tag.end()):
            name = end[1]
            if name is None or body[end.start() - 1] == "\n" or (name.strip() in known and name.strip() not in texts):
                break
        else:
            raise CallError(f"no {closing} after {tag[0]}")
        text = body[tag.end() : end.start()]
        texts[tag[1].strip()] = text if name is None else text.removesuffix("\n")
        place = end.start()


def _received_call(name: str, body: str) -> dict[str, Any]:
    """The call of a function that is the recipient of JSON."""
    return _check_call({"name": name, "arguments": _parse_value(body)}, "arguments")


def _parse_braced(body: str, types: Types) -> dict[str, Any]:
    """Gemma 4: a call `call:name{key:value}`, with unquoted keys, and a token in place of quotation marks."""
    head, brace, rest = body.partition("{")
    name = head.removeprefix("call:").strip()
    if not brace or not head.startswith("call:") or not name:
        raise CallError("expected call:name{...} after <|tool_call>")
    pieces = (brace + rest).split(_QUOTE)
    for place, piece in enumerate(pieces):
        pieces[place] = json.dumps(piece) if place % 2 else _KEY.sub(_quote_key, piece)
    return _received_call(name, "".join(pieces))


def _quote_key(match: re.Match[str]) -> str:
    """A key with quotation marks; a text that has them is left as it is."""
    return match[0] if match[2] is None else f'{match[1]}"{match[2]}":'


FORMATS: dict[str, Format] = {
    "hermes": Format(_tagged_calls(_json_call)),
    "qwen3_coder": Format(_tagged_calls(_parse_function)),
    "llama3": Format(_read_llama3),
    "glm45": Format(_tagged_calls(_parse_keyed)),
    "gpt_oss": Format(_gpt_oss, "", ""),
    "gemma4": Format(_tagged_calls(_parse_braced, "<|tool_call>", "<tool_call|>"), "<|channel>thought", "<channel|>"),
}


def _convert_argument(text: str, kinds: frozenset[str]) -> Any:
    """Convert an argument to one of these types; it remains text if there are none, or if it has another type."""
    word = text.strip()
    if "null" in kinds and word in ("null", "None"):
        return None
    listed = {kind for kind in kinds if kind.startswith('"')}
    if not kinds or "string" in kinds or json.dumps(text) in listed or (listed and kinds <= listed | {"null"}):
        return text
    try:
        return _parse_value(word.lower() if word.lower() in ("true", "false") else word)
    except ValueError:
        return text


def _split_objects(text: str) -> list[str]:
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


def _describe_error(error: ValueError) -> str:
    return f"malformed call: {cut(' '.join(str(error).split()))}"


def _of_user(read: Callable[[str], Any], path: str) -> Parser:
    """The parser that calls the user's function `read`."""

    def parse(text: str, before: str = "") -> dict[str, Any]:
        try:
            message = read(text)
        except ValueError as error:
            return {"role": "assistant", "content": text, "error": _describe_error(error)}
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
