"""Conversations with tools and environments as tokens: the prompt, and the messages that follow a turn of the model.

The tokens that the model sampled are never rendered again: only new messages are, after a placeholder for the model's
turn. Where that turn ends in the tokens of the rendered conversation depends on the chat template, and is probed.
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.config.lm import LMDataConfig
from phalanx.models.lm.chat import ChatRenderer, roles_of, template_of, with_system_prompt

log = logging.getLogger(__name__)
Messages = list[dict[str, Any]]
# A rule maps the tokens of a conversation up to a turn of the model, and those of the whole conversation, to the tokens
# that follow the turn; None if the rule does not apply.
Rule = Callable[[list[int], list[int]], list[int] | None]
_ID = "call{:05d}"  # nine letters and digits, which Mistral's templates require
_TURNS = 64  # limit of turns in the cache
_WORDS = ("pebble", "a longer sentence about birch trees")  # placeholders for a turn of the model


class TurnRenderer:
    """Renders conversations with the given tools to tokens, by the chat template of the model's folder `path`.

    The template's process runs until `close()`, or until the parent process ends.
    """

    def __init__(
        self,
        tokenizer: Any,
        data: LMDataConfig,
        path: str,
        tools: Sequence[dict[str, Any]],
        end_tokens: Sequence[int],
        *,
        calls: int = 1,
    ) -> None:
        """`calls`: maximum number of calls in a turn. Raises ValueError, in one line, for an unusable template."""
        if tokenizer.chat_template is None:
            raise ValueError(f"model.path: {path!r} has no chat template; expected one that renders several turns")
        self._tokenizer, self._system, self._tools = tokenizer, data.system_prompt, list(tools) or None
        self._ends = frozenset(end_tokens)
        self._renderer = ChatRenderer(template_of(tokenizer, self._tools, path), tokenizer, data, path)
        self._turns: dict[str, list[int]] = {}  # tokens up to and including a turn, by the conversation
        self._rules: dict[str, Rule] = {}  # by the role of the message that follows a turn
        refused = {}
        for role in ("user", "tool") if self._tools else ("user",):
            try:
                self._rules[role] = self._rule(role, calls)
            except ValueError as error:
                refused[role] = str(error)
        needed = "tool" if self._tools else "user"
        if needed in refused:
            self.close()
            raise ValueError(refused[needed])
        self._check_tools()

    @property
    def roles(self) -> frozenset[str]:
        """Roles of messages that can follow a turn: tool if there are tools, and user if the template supports it."""
        return frozenset(self._rules)

    def prompt(self, messages: Messages) -> list[int]:
        """Tokens of a conversation without a turn of the model; its first turn follows them directly."""
        return self._encode(self._renderer.text(with_system_prompt(messages, self._system), self._tools))

    def answer(self, messages: Messages) -> list[int]:
        """Tokens after the end token of a turn: those of `messages`, and those that begin the model's next turn.

        All messages are of the user, or the first ones are of tools, one for each call of the turn.
        """
        if not messages:
            raise ValueError("an environment says nothing after a turn; expected a message, or that it was the last")
        role = messages[0]["role"]
        if role not in self._rules:
            raise ValueError(f"{self._renderer.name} does not render a message of the role {role!r} after a turn")
        tokens = self._after(self._rules[role], _history(messages, 0), messages)
        if tokens is None:
            raise ValueError(f"{self._renderer.name} does not render what follows a turn in {roles_of(messages)}")
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a turn without its end token, but with other special tokens, which a parser of calls may need."""
        kept = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def close(self) -> None:
        """End the template's process."""
        self._renderer.close()

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _after(self, rule: Rule, history: Messages, messages: Messages) -> list[int] | None:
        """The tokens of messages after a history that ends in a turn of the model."""
        key = json.dumps(history)
        if key not in self._turns:
            if len(self._turns) == _TURNS:  # a policy may call tools by any name
                self._turns.clear()
            turn = self._renderer.text(history, self._tools, add_generation_prompt=False)
            self._turns[key] = self._encode(turn.rstrip())  # whitespace after a turn belongs to what follows
        whole = self._encode(self._renderer.text([*history, *_with_ids(messages)], self._tools))
        tokens = rule(self._turns[key], whole)
        # for some models, the end token of a turn is the first token of the next message
        return tokens[1:] if tokens and tokens[0] in self._ends else tokens

    def _rule(self, role: str, calls: int) -> Rule:
        """The first rule that is correct for messages of this role after a turn."""
        rules = [_counted(token, extra) for extra in (0, 1) for token in sorted(self._ends)]
        for rule in (*rules, _continued):
            if all(self._is_right(rule, role, count) for count in range(1, calls + 1 if role == "tool" else 2)):
                return rule
        probe = self._probe(role, 1, 0)
        text = self._renderer.text([*_history(probe, 0), *_with_ids(probe)], self._tools)
        if probe[0]["content"] not in text:
            raise ValueError(
                f"{self._renderer.name} omits the text of a message of the role {role!r} after a turn; expected "
                "one that renders it"
            )
        raise ValueError(
            f"{self._renderer.name} renders a message of the role {role!r} differently after different turns; "
            "expected one whose text of a message does not depend on what was said before"
        )

    def _is_right(self, rule: Rule, role: str, count: int) -> bool:
        """Whether the rule finds the same tokens after two different turns, and a longer conversation ends in them."""
        first, second = self._probe(role, count, 0), self._probe(role, count, 1)
        tokens = self._after(rule, _history(second, 0), second)
        if tokens is None or tokens != self._after(rule, _history(second, 1), second):
            return False
        text = self._tokenizer.decode(tokens)
        if not all(message["content"] in text for message in second) or any(word in text for word in _WORDS):
            return False
        longer = [*_history(first, 0), *_with_ids(first), *_history(second, 1)[1:], *_with_ids(second)]
        whole = self._encode(self._renderer.text(longer, self._tools))
        return whole[len(whole) - len(tokens) :] == tokens

    def _check_tools(self) -> None:
        """Warn about a template that does not describe the tools to the model."""
        text = self._renderer.text([{"role": "user", "content": "A question."}], self._tools)
        silent = [tool["function"]["name"] for tool in self._tools or () if tool["function"]["name"] not in text]
        if silent:
            log.warning(
                "%s writes no tools into a prompt; describe %s in data.system_prompt, with how they are called",
                self._renderer.name,
                ", ".join(silent),
            )

    def _probe(self, role: str, count: int, number: int) -> Messages:
        """Test messages that follow a turn."""
        messages: Messages = [{"role": role, "content": f"maple {number} of {i}"} for i in range(count)]
        if role == "tool":
            assert self._tools is not None
            for message in messages:
                message["name"] = self._tools[0]["function"]["name"]
        return messages


def _history(messages: Messages, words: int) -> Messages:
    """A conversation up to a turn of the model that these messages can follow; the turn says _WORDS[words]."""
    calls = []
    for message in _with_ids(messages):
        if message["role"] == "tool":
            function = {"name": message["name"], "arguments": {"text": _WORDS[words]}}
            calls.append({"type": "function", "id": message["tool_call_id"], "function": function})
    turn: dict[str, Any] = {"role": "assistant", "content": _WORDS[words]}
    if calls:
        turn |= {"content": "", "tool_calls": calls}
    return [{"role": "user", "content": "A question."}, turn]


def _with_ids(messages: Messages) -> Messages:
    """The messages, with the identifiers and names that some templates require of tools' messages."""
    result = []
    for number, message in enumerate(messages):
        tool = {"name": "tool", "tool_call_id": _ID.format(number)} if message["role"] == "tool" else {}
        result.append({**tool, **message})
    return result


def _counted(end: int, extra: int) -> Rule:
    """The tokens after as many `end` tokens as there are up to the turn, less `extra`.

    extra: number of end tokens that the template appends only to the last turn of a conversation.
    """

    def rule(turn: list[int], whole: list[int]) -> list[int] | None:
        left = turn.count(end) - extra
        if left <= 0:
            return None
        for place, token in enumerate(whole):
            left -= token == end
            if left == 0:
                return whole[place + 1 :]
        return None

    return rule


def _continued(turn: list[int], whole: list[int]) -> list[int] | None:
    """The tokens after those up to the turn, if the whole conversation begins with these."""
    return whole[len(turn) :] if whole[: len(turn)] == turn else None
