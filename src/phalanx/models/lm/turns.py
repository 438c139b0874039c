"""Conversations with tools and environments as tokens: the prompt, and the messages that follow a turn of the model.

The tokens that the model sampled are never rendered again: only new messages are, in their conversation, whose turns of
the model are placeholders. Where a turn ends in the tokens of the rendered conversation depends on the chat template,
and is probed.
"""

import logging
import os.path
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple

from phalanx.config.lm import LMDataConfig
from phalanx.models.lm.chat import ChatRenderer, roles_of, template_of, with_system_prompt

log = logging.getLogger(__name__)
Messages = list[dict[str, Any]]
_ID = "call{:05d}"  # nine letters and digits, which Mistral's templates require
_WORDS = ("pebble", "a longer sentence about birch trees")  # placeholders for a turn of the model
_QUESTION = {"role": "user", "content": "A question."}
_NOTHING: dict[str, Any] = {}
_TURN = {"role": "assistant", "content": ""}
_BEFORE = 64  # tokens in which the beginning of a turn's thoughts is looked for


class Rule(NamedTuple):
    """How the tokens that follow a turn are found in those of a conversation.

    end: they begin after as many of this token as the conversation up to the turn has, less `extra`, the number that
        the template appends only to the last turn; None: they follow the tokens up to the turn.
    opens: `end` begins a message of this role, and is not what ends a turn.
    """

    end: int | None
    extra: int = 0
    opens: bool = False

    def following(self, turn: list[int], whole: list[int]) -> list[int] | None:
        """The tokens that follow the turn; None if the rule does not apply.

        turn: tokens of the conversation up to the turn. whole: those of the whole conversation.
        """
        if self.end is None:
            return whole[len(turn) :] if whole[: len(turn)] == turn else None
        left = turn.count(self.end) - self.extra
        if left <= 0:
            return None
        for place, token in enumerate(whole):
            left -= token == self.end
            if left == 0:
                return whole[place + 1 :]
        return None


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
        self._marks = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in self._ends}
        self._rules: dict[str, Rule] = {}  # by the role of the message that follows a turn
        self._unanswered = False  # the template renders turns with more calls than answers
        refused = {}
        for role in ("user", "tool") if self._tools else ("user",):
            try:
                self._rules[role] = self._find_rule(role, calls)
            except ValueError as error:
                refused[role] = str(error)
        needed = "tool" if self._tools else "user"
        if needed in refused:
            self.close()
            raise ValueError(refused[needed])
        self._check_tools()
        if self._tools:
            self._unanswered = self._takes_unanswered()

    @property
    def roles(self) -> frozenset[str]:
        """Roles of messages that can follow a turn: tool if there are tools, and user if the template supports it."""
        return frozenset(self._rules)

    def prompt(self, messages: Messages) -> list[int]:
        """Tokens of a conversation without a turn of the model; its first turn follows them directly."""
        return self._encode_text(self._renderer.text(with_system_prompt(messages, self._system), self._tools))

    def answer(
        self, messages: Messages, history: Messages | None = None, end: int | None = None, *, open: bool = False
    ) -> list[int]:
        """Tokens after the end token of a turn: those of `messages`, and those that begin the model's next turn.

        messages: all are of the user, or the first ones are of tools, one for each call of the turn.
        history: the conversation up to the turn, which is the last message; None: a question and a turn.
        end: the end token that was sampled; None: the template's own. open: the turn has none, which is added.
        """
        if not messages:
            raise ValueError("an environment says nothing after a turn; expected a message, or that it was the last")
        role = messages[0]["role"]
        if role not in self._rules:
            raise ValueError(f"{self._renderer.name} does not render a message of the role {role!r} after a turn")
        rule, tokens = self._rules[role], None
        with suppress(ValueError):  # the model may write identifiers and names that the template refuses
            past = [_QUESTION, _TURN] if history is None else with_system_prompt(history, self._system)
            tokens = self._following_tokens(rule, past, messages)
        if tokens is None:
            numbered = [{**message, "tool_call_id": None} for message in messages]
            tokens = self._following_tokens(rule, [_QUESTION, _TURN], numbered)
        if tokens is None:
            raise ValueError(f"{self._renderer.name} does not render what follows a turn in {roles_of(messages)}")
        if not open:
            return self._tokens_behind(end, rule, tokens)
        return tokens if rule.end is None or tokens[:1] == [rule.end] else [rule.end, *tokens]

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a turn without its end token, but with other special tokens, which a parser of calls may need."""
        kept = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        return str(self._tokenizer.decode(kept, skip_special_tokens=False))

    def before(self, tokens: Sequence[int]) -> str:
        """The end of the text that precedes a turn, in which the template may have opened its thoughts."""
        return str(self._tokenizer.decode(tokens[-_BEFORE:], skip_special_tokens=False))

    def close(self) -> None:
        """End the template's process."""
        self._renderer.close()

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _following_tokens(
        self, rule: Rule, past: Messages, messages: Messages, word: str = _WORDS[0]
    ) -> list[int] | None:
        """The tokens of messages after a conversation that ends in a turn of the model."""
        whole = _placeholder_turns([*past, *messages], word, self._unanswered)
        turn = {"messages": whole[: len(past)], "add_generation_prompt": False}
        texts = self._renderer.texts([{"tools": self._tools} | turn, {"tools": self._tools, "messages": whole}])
        texts[0] = texts[0].rstrip()  # whitespace after a turn belongs to what follows
        common = self._common_length(rule, texts)
        return rule.following(self._encode_text(texts[0][common:]), self._encode_text(texts[1][common:]))

    def _common_length(self, rule: Rule, texts: list[str]) -> int:
        """The number of characters that both texts begin with and that need no tokens, because the rule finds the same
        without them. They end before a special token; of those that the rule counts, two remain.
        """
        place = len(os.path.commonprefix(texts))  # noqa: RUF071 - it compares characters, as is meant here
        for _ in range(2):
            marks = self._marks.values() if rule.end is None else [self._marks[rule.end]]
            before, place = place, 0
            for mark in marks:
                place = max(place, texts[0].rfind(mark, 0, before))
        return place

    def _tokens_behind(self, end: int | None, rule: Rule, tokens: list[int]) -> list[int]:
        """The tokens of an answer behind the end token that was sampled.

        For some models, an end token begins the next message. It follows a turn that ended with another one; the token
        that ends all turns of a template follows no other end token, except one that begins messages.
        """
        if tokens and tokens[0] in self._ends:
            return tokens[1:] if end is None or end == tokens[0] else tokens
        if rule.end is None or end in (None, rule.end):
            return tokens
        opens = rule.opens or any(each.opens and each.end == end for each in self._rules.values())
        return [rule.end, *tokens] if opens else tokens

    def _find_rule(self, role: str, calls: int) -> Rule:
        """The first rule that is correct for messages of this role after a turn."""
        rules = [Rule(token, extra) for extra in (0, 1) for token in sorted(self._ends)]
        for rule in (*rules, Rule(None)):
            if all(self._is_right(rule, role, count) for count in range(1, calls + 1 if role == "tool" else 2)):
                return rule._replace(opens=self._is_opening(rule, role))
        probe = self._test_messages(role, 1, 0)
        text = self._renderer.text(_placeholder_turns([_QUESTION, _TURN, *probe], _WORDS[0], False), self._tools)
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
        """Whether the rule finds the same tokens after two different turns; and after a conversation with a turn of the
        same form before, the same but for numbers and identifiers.
        """
        first, second = self._test_messages(role, count, 0), self._test_messages(role, count, 1)
        forms = set()
        for past in ([_QUESTION, _TURN], [_QUESTION, _TURN, *first, _TURN]):
            tokens = self._following_tokens(rule, past, second)
            if tokens is None or tokens != self._following_tokens(rule, past, second, _WORDS[1]):
                return False
            text = self._tokenizer.decode(tokens)
            if not all(message["content"] in text for message in second) or any(word in text for word in _WORDS):
                return False
            forms.add(re.sub(r"\d+", "0", text))
        return len(forms) == 1

    def _is_opening(self, rule: Rule, role: str) -> bool:
        """Whether the rule's token begins each message: it is between two, and not behind the last one."""
        if rule.end is None:
            return False
        probe, mark = self._test_messages(role, 2, 0), self._marks[rule.end]
        try:
            tokens = self._following_tokens(rule, [_QUESTION, _TURN], probe)
        except ValueError:  # a template that takes one call
            return False
        between, _, behind = self._tokenizer.decode(tokens or []).partition(probe[1]["content"])
        return mark in between.partition(probe[0]["content"])[2] and mark not in behind

    def _takes_unanswered(self) -> bool:
        """Whether the template renders a turn with two calls of which one is answered."""
        (answer,) = self._test_messages("tool", 1, 0)
        call = {"type": "function", "function": {"name": answer["name"]}}
        chat = _placeholder_turns([_QUESTION, _TURN | {"tool_calls": [call, call]}, answer], _WORDS[0], True)
        try:
            return bool(self._renderer.text(chat, self._tools))
        except ValueError:
            return False

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

    def _test_messages(self, role: str, count: int, number: int) -> Messages:
        """Test messages that follow a turn."""
        messages: Messages = [{"role": role, "content": f"maple {number} of {i}"} for i in range(count)]
        if role == "tool":
            assert self._tools is not None
            for message in messages:
                message["name"] = self._tools[0]["function"]["name"]
        return messages


def _placeholder_turns(messages: Messages, word: str, unanswered: bool) -> Messages:
    """A conversation whose turns of the model are placeholders that say `word`. They have the identifiers and names of
    their calls, and so have the answers of tools; calls without an identifier are numbered over the conversation.

    unanswered: turns also have the calls that no tool answered.
    """
    result: Messages = []
    calls: Messages = []  # those that tools' messages have not answered yet
    number = 0
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            answers = list(takewhile(lambda each: each["role"] == "tool", messages[place + 1 :]))
            written = message.get("tool_calls")
            if not isinstance(written, list):
                written = []
            if not answers or not unanswered:
                written = written[: len(answers)]
            pairs = zip_longest(answers, written, fillvalue=_NOTHING)
            calls = [_placeholder_call(answer, call, word, number + i) for i, (answer, call) in enumerate(pairs)]
            number += len(calls)
            turn = {"content": "", "tool_calls": list(calls)} if calls else {"content": word}
            result.append({"role": "assistant"} | turn)
        elif message["role"] == "tool":
            call = calls.pop(0) if calls else _placeholder_call(message, _NOTHING, word, number)
            identifier = {"tool_call_id": call["id"]}
            result.append({"name": call["function"]["name"]} | identifier | message | identifier)
        else:
            result.append(message)
    return result


def _placeholder_call(answer: dict[str, Any], written: Any, word: str, number: int) -> dict[str, Any]:
    """A call with the identifier and the name in the answer of its tool, or those that the model or the data wrote."""
    written = written if isinstance(written, dict) else _NOTHING
    function = written.get("function")
    name = answer.get("name") or (function if isinstance(function, dict) else written).get("name") or "tool"
    identifier = answer.get("tool_call_id") or written.get("id") or _ID.format(number)
    return {"type": "function", "id": str(identifier), "function": {"name": name, "arguments": {"text": word}}}
