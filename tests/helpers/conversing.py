"""Turns of a model that call tools, and a conversation with scripted turns."""

from collections.abc import Sequence
from typing import Any

from phalanx.environments import Conversation, Message


def call(name: str, **arguments: Any) -> Message:
    """A turn of the model that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def say(content: str) -> Message:
    """A turn of the model without a call."""
    return {"role": "assistant", "content": content}


def converse(conversation: Conversation, prompt: str, turns: Sequence[Message]) -> list[Message]:
    """All messages of a conversation with these turns of the model, until it ends."""
    added = conversation.reset().result(30)
    messages: list[Message] = [{"role": "user", "content": prompt + "".join(message["content"] for message in added)}]
    for turn in turns:
        assert conversation.ended is None, conversation.problem
        messages += [turn, *conversation.hear(turn).result(30).messages]
    return messages
