"""Conversations with tools and environments as tokens: the prompt, and what follows a turn of the model.

What the model sampled stays as it was sampled: of a conversation, only what is new is rendered, behind a turn that
stands for the model's. Where that turn ends in the tokens of the whole depends on the chat template, and is probed.
"""

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.config.lm import LMDataConfig
from phalanx.models.lm.chat import ChatRenderer, template_of, with_system_prompt

log = logging.getLogger(__name__)
Messages = list[dict[str, Any]]
# The tokens of a conversation behind a turn of the model, whose conversation up to that turn has the other tokens;
# None where the rule does not apply.
Rule = Callable[[list[int], list[int]], list[int] | None]
_ID = "call{:05d}"  # nine letters and digits, which the templates of Mistral demand
_TURNS = 64  # that are kept
_WORDS = ("pebble", "a longer sentence about birch trees")  # of turns that stand for the model's


class TurnRenderer:
    """Tokens of conversations with these tools, by the chat template of the model's folder `path`.

    The process of the template runs until `close()`, or until this one ends.
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
        """`calls`: most calls of a turn. Raises ValueError, with one line, for a template that cannot be used."""
        if tokenizer.chat_template is None:
            raise ValueError(f"model.path: {path!r} has no chat template; expected one that renders several turns")
        self._tokenizer, self._system, self._tools = tokenizer, data.system_prompt, list(tools) or None
        self._ends = frozenset(end_tokens)
        self._renderer = ChatRenderer(template_of(tokenizer, self._tools, path), tokenizer, data, path)
        self._turns: dict[str, list[int]] = {}  # tokens up to a turn, by what calls and messages it has
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
        """The roles of messages that can follow a turn: tool if there are tools, and user unless the template renders
        what follows an answer of the assistant in a way of its own.
        """
        return frozenset(self._rules)

    def prompt(self, messages: Messages) -> list[int]:
        """Tokens of a conversation that the model has not spoken in, behind which its first turn begins."""
        return self._encode(self._renderer.text(with_system_prompt(messages, self._system), self._tools))

    def answer(self, messages: Messages) -> list[int]:
        """Tokens that follow a turn of the model, behind its end token: these messages, and what begins its next turn.

        All are of the user, or some of tools come first, one for each call of the turn.
        """
        if not messages:
            raise ValueError("an environment says nothing behind a turn; expected a message, or that it was the last")
        role = messages[0]["role"]
        if role not in self._rules:
            raise ValueError(f"{self._renderer.name} does not render a message of the role {role!r} behind a turn")
        tokens = self._behind(self._rules[role], _history(messages, 0), messages)
        if tokens is None:
            raise ValueError(f"{self._renderer.name} does not render what follows a turn in {_shown(messages)}")
        return tokens

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a turn without its end token, with the special tokens that a parser of calls may look for."""
        kept = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def close(self) -> None:
        """End the template's process."""
        self._renderer.close()

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _behind(self, rule: Rule, history: Messages, messages: Messages) -> list[int] | None:
        """The tokens of messages behind a history that ends in a turn of the model."""
        key = json.dumps(history)
        if key not in self._turns:
            if len(self._turns) == _TURNS:  # a policy may call tools by any name
                self._turns.clear()
            turn = self._renderer.text(history, self._tools, add_generation_prompt=False)
            self._turns[key] = self._encode(turn.rstrip())  # space behind a turn is of what follows it
        whole = self._encode(self._renderer.text([*history, *_with_ids(messages)], self._tools))
        tokens = rule(self._turns[key], whole)
        # some models end a turn by the token that begins what follows
        return tokens[1:] if tokens and tokens[0] in self._ends else tokens

    def _rule(self, role: str, calls: int) -> Rule:
        """The first rule that is right for messages of a role behind a turn."""
        rules = [_counted(token, extra) for extra in (0, 1) for token in sorted(self._ends)]
        for rule in (*rules, _continued):
            if all(self._is_right(rule, role, count) for count in range(1, calls + 1 if role == "tool" else 2)):
                return rule
        probe = self._probe(role, 1, 0)
        text = self._renderer.text([*_history(probe, 0), *_with_ids(probe)], self._tools)
        if probe[0]["content"] not in text:
            raise ValueError(
                f"{self._renderer.name} leaves out the text of a message of the role {role!r} behind a turn; expected "
                "one that renders it"
            )
        raise ValueError(
            f"{self._renderer.name} renders a message of the role {role!r} in another way behind another turn; "
            "expected one whose text of a message does not depend on what was said before"
        )

    def _is_right(self, rule: Rule, role: str, count: int) -> bool:
        """Whether two turns of other words have the same behind them, which ends a longer conversation, too."""
        first, second = self._probe(role, count, 0), self._probe(role, count, 1)
        tokens = self._behind(rule, _history(second, 0), second)
        if tokens is None or tokens != self._behind(rule, _history(second, 1), second):
            return False
        text = self._tokenizer.decode(tokens)
        if not all(message["content"] in text for message in second) or any(word in text for word in _WORDS):
            return False
        longer = [*_history(first, 0), *_with_ids(first), *_history(second, 1)[1:], *_with_ids(second)]
        whole = self._encode(self._renderer.text(longer, self._tools))
        return whole[len(whole) - len(tokens) :] == tokens

    def _check_tools(self) -> None:
        """Warn of a template that does not tell the model of its tools."""
        text = self._renderer.text([{"role": "user", "content": "A question."}], self._tools)
        silent = [tool["function"]["name"] for tool in self._tools or () if tool["function"]["name"] not in text]
        if silent:
            log.warning(
                "%s writes no tools into a prompt; describe %s in data.system_prompt, with how they are called",
                self._renderer.name,
                ", ".join(silent),
            )

    def _probe(self, role: str, count: int, number: int) -> Messages:
        """Messages that follow a turn."""
        messages: Messages = [{"role": role, "content": f"maple {number} of {i}"} for i in range(count)]
        if role == "tool":
            assert self._tools is not None
            for message in messages:
                message["name"] = self._tools[0]["function"]["name"]
        return messages


def _history(messages: Messages, words: int) -> Messages:
    """A conversation up to a turn of the model that these messages can follow, of one words or of others."""
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
    """The messages, of which those of tools have the identifiers and names that some templates demand."""
    given = []
    for number, message in enumerate(messages):
        tool = {"name": "tool", "tool_call_id": _ID.format(number)} if message["role"] == "tool" else {}
        given.append({**tool, **message})
    return given


def _counted(end: int, extra: int) -> Rule:
    """Behind as many of these end tokens as there are up to the turn: what a template adds to its last turn plays no
    part. `extra`: how many it adds behind the last.
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
    """Behind the tokens up to the turn, with which those of the whole begin."""
    return whole[len(turn) :] if whole[: len(turn)] == turn else None


def _shown(messages: Messages) -> str:
    return ", ".join(message["role"] for message in messages)
