"""Converts values that an environment returns to texts and messages for the model."""

import json
import math
import numbers
from contextlib import suppress
from typing import Any

from PIL import Image

from phalanx.config.messages import cut
from phalanx.config.secrets import hide
from phalanx.data.prompts import MARK
from phalanx.data.shown import IMAGE_PARTS
from phalanx.environments.turn import Message, Turn

_CHARACTERS = 16  # maximum characters of a token, by which texts are truncated before they are tokenized
_MOST_BITS = 10_000  # of an integer that is written out; Python refuses more than 4300 digits
_ONLY_TEXT = "the model sees only those of the prompt, expected a text"
SEEN = f"an image; {_ONLY_TEXT}"
_TEXT_KEYS = {"type", "text", "annotations", "cache_control", "meta", "_meta"}  # of a part, in OpenAI's form and MCP's
_OTHER_PARTS = (*IMAGE_PARTS, "video", "video_url", "audio", "audio_url", "input_audio")
_TURN_KEYS = {"messages", "observation", "observations", "reward", "done"}
_TURNS = (
    "expected a Turn, a text, a list of messages, a dict with messages, reward and done, or (messages, reward, done)"
)


class Odd(Exception):
    """An environment returned an invalid value; the message is a phrase."""


def text_of(value: Any, most_tokens: int, side: str) -> str:
    """The value that a tool returned, as a text for the tokenizer without secrets, truncated if it certainly has more
    than `most_tokens` tokens; the parts of a message are joined. Raises Odd for an image.
    """
    if isinstance(value, str):
        text = value
    elif is_parts(value):
        text = _join_texts(value, "a tool")
    elif value is None:
        text = ""
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        text = f"an integer of {math.ceil(value.bit_length() * math.log10(2))} digits or so"
    elif isinstance(value, dict | list | tuple | bool | int | float):
        try:
            text = json.dumps(value, ensure_ascii=False, default=_value_text)
        except TypeError:  # keys that are not texts
            text = _value_text(value)
        except (ValueError, RecursionError) as error:
            raise Odd(
                f"a tool returned a {type(value).__name__} that JSON cannot represent: {cut(str(error))}"
            ) from error
    else:
        text = _value_text(value)
    text = shortened(hide(text), _CHARACTERS * most_tokens, side)
    return text.encode("utf-8", "replace").decode()  # lone surrogates become question marks


def is_parts(value: Any) -> bool:
    """Whether a value is the content of a message as parts, as OpenAI and TRL write it: [{type: text, text}, ...]."""
    return isinstance(value, list) and bool(value) and all(map(_is_part, value))


def _is_part(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    if value["type"] == "text":  # with other keys, it is data
        return isinstance(value.get("text"), str) and value.keys() <= _TEXT_KEYS
    return value["type"] in _OTHER_PARTS and (value["type"] in value or {"data", "mimeType"} <= value.keys())


def _join_texts(parts: list[dict[str, Any]], what: str) -> str:
    """The texts of parts, one after the other, as chat templates render them. Raises Odd for a part of another type."""
    for part in parts:
        if part["type"] != "text":
            kind = "an image" if part["type"] in IMAGE_PARTS else f"a part of the type {part['type']}"
            raise Odd(f"{what} returned {kind}; {_ONLY_TEXT}")
    return "".join(part["text"] for part in parts)


def _value_text(value: Any) -> str:
    """The text of a value that JSON cannot represent."""
    if isinstance(value, Image.Image):
        raise Odd(f"a tool returned {SEEN}")
    return str(value)


def shortened(text: Any, most: int, side: str) -> Any:
    """The `most` elements that remain of a text or list of tokens whose `side` (left, middle or right) is cut."""
    if len(text) <= most:
        return text
    if side == "left":
        return text[len(text) - most :]
    head = most if side == "right" else (most + 1) // 2
    return text[:head] + text[len(text) - (most - head) :]


def messages_of(value: Any, most_tokens: int, side: str, what: str) -> list[Message]:
    """The messages that `what` returned: None, a text or its parts (a message of the user), or messages, whose
    contents may be parts as well. Raises Odd.
    """
    if is_parts(value):
        value = _join_texts(value, what)
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": text_of(value, most_tokens, side)}]
    if isinstance(value, dict) and "role" in value:
        value = [value]
    if not isinstance(value, list):
        raise Odd(f"{what} returned a {type(value).__name__}; expected None, a text or a list of messages")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Odd(f"{what} returned the message {cut(repr(message))}; expected a dict with role and content")
        if is_parts(message.get("content")):
            message = {**message, "content": _join_texts(message["content"], what)}
        if not isinstance(message.get("content"), str):
            kind = type(message.get("content")).__name__
            raise Odd(f"{what} returned a message with a content of type {kind}; expected a text")
        try:
            json.dumps(message)
        except (TypeError, ValueError) as error:  # records and the process of the chat template need it as JSON
            raise Odd(f"{what} returned a message that JSON cannot represent: {error}") from error
        messages.append({**message, "content": text_of(message["content"], most_tokens, side)})
    return messages


def turn_of(value: Any, most_tokens: int, side: str, what: str) -> Turn:
    """The Turn that `what`, such as step, returned in any of the allowed forms. Raises Odd for other values."""
    messages: Any
    reward: Any
    flags: dict[str, Any]
    if isinstance(value, Turn):
        messages, reward, flags = value.messages, value.reward, {"done": value.done}
    elif isinstance(value, dict) and "role" not in value:
        unknown = sorted(map(str, value.keys() - _TURN_KEYS - {"info", "metadata", "terminated", "truncated"}))
        if unknown:
            raise Odd(f"{what} returned a dict with {', '.join(unknown)}; {_TURNS}")
        spoken = [value[key] for key in ("messages", "observations", "observation") if key in value]
        messages, reward = (spoken[0] if spoken else None), value.get("reward", 0.0)
        flags = {key: value[key] for key in ("done", "terminated", "truncated") if value.get(key) is not None}
    elif isinstance(value, tuple):
        if not 3 <= len(value) <= 5:
            raise Odd(f"{what} returned {len(value)} values; {_TURNS}")
        messages, reward, flags = value[0], value[1], {"done": value[2]}
        if len(value) == 5 or (len(value) == 4 and not isinstance(value[3], dict | None)):
            flags["truncated"] = value[3]  # as of gymnasium; the fourth one of gym is a dict
    elif isinstance(value, str | list | dict):
        messages, reward, flags = value, 0.0, {}
        if isinstance(value, dict) and not value.keys().isdisjoint({"reward", "done"}):
            raise Odd(f"{what} returned a message with a reward or done among its keys; {_TURNS}")
    else:
        raise Odd(f"{what} returned a {type(value).__name__}; {_TURNS}")
    done = False
    for name, flag in flags.items():
        if type(flag).__module__ == "numpy":  # as comparisons of arrays give it
            flag = flag.tolist()
        if not isinstance(flag, bool):
            raise Odd(f"{what} returned {cut(repr(flag))} for {name}; expected true or false")
        done = done or flag
    return Turn(messages_of(messages, most_tokens, side, what), number_of(reward, what), done)


def number_of(value: Any, what: str) -> float:
    """A reward as a number; 0 for None. Raises Odd for a value that is not a finite number."""
    if value is None:
        return 0.0
    number: float | None = None
    if isinstance(value, numbers.Real) or type(value).__module__ in ("numpy", "torch"):
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = float(value)
    if number is None:
        raise Odd(f"{what} returned the reward {cut(repr(value))}; expected a number")
    if not abs(number) < float("inf"):
        raise Odd(f"{what} returned the reward {number}; expected a finite number")
    return number


def reward_of(value: Any, what: str) -> float | dict[str, float] | None:
    """The reward that `get_reward` returned. Raises Odd if it is not a number, a dict of numbers or None."""
    if isinstance(value, dict):
        rewards = {}
        for name, part in value.items():
            if not isinstance(name, str) or part is None:
                raise Odd(f"{what} returned {cut(repr({name: part}))}; expected numbers by names")
            rewards[name] = number_of(part, what)
        return rewards
    return None if value is None else number_of(value, what)


def joined(prompt: list[Message], added: list[Message]) -> list[Message]:
    """A prompt's messages and those that `reset` added; two of the user that meet there become one message."""
    if prompt and added and prompt[-1]["role"] == added[0]["role"] == "user":
        content, text = prompt[-1]["content"], added[0]["content"]
        more = [{"type": "text", "text": text}] if isinstance(content, list) else text
        last = {**prompt[-1], "content": content + more}
        return [*prompt[:-1], last, *added[1:]]
    return [*prompt, *added]


def in_texts(messages: list[Message]) -> list[Message]:
    """The messages, with contents that are lists of parts converted to texts with a mark for each image."""
    result = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": "".join(part.get("text", MARK) for part in content)}
        result.append(message)
    return result
