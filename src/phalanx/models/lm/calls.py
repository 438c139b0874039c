"""Calls of tools in what a language model wrote, by the format in which its model family writes them.

The parsers read each character a fixed number of times, and a call that is malformed makes an `error` of one line in
place of an exception: a policy may write anything. transformers' own, `parse_response`, gives up at the first malformed
call, and needs a description of the format that few model folders have.
"""

from collections.abc import Callable, Sequence
from typing import Any

from phalanx.config.files import parse_json

# The message {role, content} of a text, with `tool_calls` where there are any, `reasoning_content` where it thinks
# first, and `error` where a call is malformed: one line on the first of these.
Parser = Callable[[str], dict[str, Any]]
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"


class CallError(ValueError):
    """A call that is malformed; the message is one line."""


def parser(format: str, tools: Sequence[dict[str, Any]] = ()) -> Parser:
    """The parser of `environment.format`; `tools`: their schemas, for formats that write all arguments as texts."""
    return lambda text: _message(text, _hermes)


def _message(text: str, read: Callable[[str], tuple[str, list[Any], list[str]]]) -> dict[str, Any]:
    """The message of a text, of which `read` gives the rest beside its calls, the calls, and what is wrong with some.

    A call among thoughts is none.
    """
    thoughts, thought, said = text.partition(_THOUGHT)
    if not thought:  # a template may have begun the thoughts
        thoughts, said = ("", text) if _THINK not in text else (text, "")
    content, calls, errors = read(said)
    message: dict[str, Any] = {"role": "assistant", "content": content.strip()}
    if thoughts:
        message["reasoning_content"] = thoughts.removeprefix(_THINK).strip()
    if calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    if errors:
        message["error"] = errors[0]
    return message


def _hermes(text: str) -> tuple[str, list[Any], list[str]]:
    """Calls as JSON objects between tags, as Qwen2.5, Qwen3 and Hermes write them."""
    rest, calls, errors, place = [], [], [], 0
    while (start := text.find(_OPEN, place)) >= 0:
        rest.append(text[place:start])
        end = text.find(_CLOSE, start)
        end = end if end >= 0 else len(text)  # a turn may end without the closing tag
        place = end + len(_CLOSE)
        try:
            calls.append(_call(parse_json(text[start + len(_OPEN) : end].strip()), "arguments"))
        except ValueError as error:
            errors.append(f"malformed call: {error}")
    return "".join([*rest, text[place:]]), calls, errors


def _call(value: Any, arguments: str) -> dict[str, Any]:
    """A call of a JSON value {name, arguments}."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError(f"expected an object with a name and {arguments}")
    given = value.get(arguments, {})
    if isinstance(given, str):
        given = parse_json(given)
    if not isinstance(given, dict):
        raise CallError(f"the {arguments} are no object")
    return {"name": value["name"], "arguments": given}
