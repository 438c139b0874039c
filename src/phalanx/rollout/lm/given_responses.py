"""Responses of the data instead of sampled ones, for supervised training with the same loop.

The tokens of a response are those that the policy would have sampled: a turn of the assistant is what the chat template
renders of it behind the generation prompt, up to its end token, and what lies between turns is rendered as in
conversations (phalanx.models.lm.turns). Only turns are trained, and of a turn what the template itself marks as the
assistant's, with {% generation %}, if it does.
"""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from typing import Any

from torch import Tensor

from phalanx.config.engine_facts import EngineFacts
from phalanx.config.files import json_object
from phalanx.config.lm import LMDataConfig
from phalanx.data.data_files import DataError
from phalanx.data.prompts import chat_of
from phalanx.data.unusable import UnusableRows, above_limit
from phalanx.distributed.collectives import local_numbers, on_all_ranks
from phalanx.environments.texts import in_texts
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm.chat import ChatRenderer, chat_messages, template_of, with_system_prompt
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.turns import TurnRenderer
from phalanx.rollout.lm.conversations import Conversed, marked
from phalanx.rollout.lm.in_policy import LMRollout, hand_over
from phalanx.types import Each, Prompt, Samples

log = logging.getLogger(__name__)
ANSWERS = "phalanx_answers"  # key of a prompt's meta: what follows it; of a pair, first the preferred response
Messages = list[dict[str, Any]]
Spoken = tuple[list[int], list[bool]]  # the tokens of a turn, and which of them are trained
Spans = list[tuple[int, int]]  # of a text: the characters that are trained; empty: all of them
MARKS = {"generation_begins": "\U000f0a10", "generation_ends": "\U000f0a11"}  # of the private use area


@dataclass(frozen=True)
class Answer:
    """The tokens after a prompt; `sampled` marks those of the assistant, in `turns` turns with `calls` calls of tools.
    `text`: that of the last turn. `truncated`: cut at data.max_response_length. `prompt`: the first token of a plain
    text, which no other predicts; None: the prompt's own tokens.
    """

    tokens: list[int]
    sampled: list[bool]
    turns: int
    calls: int
    text: str
    truncated: bool = False
    prompt: list[int] | None = None

    def cut(self, limit: int) -> "Answer":
        """The answer with at most `limit` tokens."""
        if len(self.tokens) <= limit:
            return self
        return replace(self, tokens=self.tokens[:limit], sampled=self.sampled[:limit], truncated=True)


class DatasetRollout(LMRollout):
    """See phalanx.types.Rollout. Validation samples from the policy. Prompts come from `read_answers`."""

    facts = EngineFacts(weights="none", redraws=False)

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Return this rank's share of the data's responses; `prompts` are those of all ranks.

        Raises JobError, on all ranks, if an image cannot be read.
        """
        n = self.config.n
        index = local_numbers(len(prompts) * n, self.world.data_rank, self.world.data_size)
        plain: list[Prompt] = []
        answers: list[Answer] = []
        for i in index.tolist():
            meta = dict(prompts[i // n].meta)
            given = meta.pop(ANSWERS)
            answers.append(given[i % n % len(given)])
            meta |= {"preferred": i % n == 0} if len(given) > 1 else {}
            plain.append(replace(prompts[i // n], meta=meta))
        self.drawn = list(on_all_ranks(lambda: list(map(self._read, plain, answers))))
        hand_over(plain, self.drawn, self.how, each, self.micro_batch_size)
        return self._samples(plain, index)

    def _read(self, prompt: Prompt, answer: Answer) -> Conversed:
        return Conversed(
            self.policy.encode(prompt) if answer.prompt is None else answer.prompt,
            answer.tokens,
            answer.text,
            answer.truncated,
            look=self.policy.look(prompt),
            sampled=answer.sampled,
            ended="tokens" if answer.truncated else "done",
            turns=answer.turns,
            calls=answer.calls,
        )

    def _trace(self, ids: Tensor, starts: Tensor, lengths: Tensor, width: int) -> TokenTrace:
        trace: TokenTrace = super()._trace(ids, starts, lengths, width)
        read: list[Any] = self.drawn
        return trace if self.talks is not None else marked(trace, read)


def split_answers(rows: list[Prompt], data: LMDataConfig) -> list[Prompt]:
    """Split each row into a prompt and what follows it, which `read_answers` reads: the text or chat in the column
    data.response_key, or without that the chat from the assistant's first message on, or all of a plain text; and for
    pairs also that in data.rejected_key. Raises DataError for a row without a response, unless data.unusable_rows is
    `filter`.
    """
    result, drop = [], UnusableRows("data.train_files", data.unusable_rows)
    for row in rows:
        try:
            result.append(_split_row(row, data))
        except DataError as error:
            drop(error)
    drop.report(len(result))
    return result


def _split_row(row: Prompt, data: LMDataConfig) -> Prompt:
    if data.response_key is None and row.messages is None:  # a plain text, whose prompt is empty
        return replace(row, text="", meta=row.meta | {ANSWERS: [[{"role": "assistant", "content": row.text}]]})
    if data.response_key is None:
        messages = chat_messages(row)
        first = list(takewhile(lambda message: message["role"] != "assistant", messages))
        if not first:
            raise DataError(f"{row.place}: its chat begins with the assistant; expected a message to be answered")
        users = [message for message in in_texts(first) if message["role"] == "user"]
        row = replace(row, messages=first, text=users[-1]["content"] if users else "")
        return replace(row, meta=row.meta | {ANSWERS: [_said(messages[len(first) :], row, "its chat")]})
    answers = []
    for key in filter(None, (data.response_key, data.rejected_key)):
        value = row.meta.get(key)
        messages = [{"role": "assistant", "content": value}] if isinstance(value, str) else []
        if isinstance(value, list):  # the chat may begin with the prompt
            every = chat_of(value, key, row.place)
            messages = list(dropwhile(lambda message: message["role"] != "assistant", every))
        answers.append(_said(messages, row, f"its column {key}"))
    if len(answers) > 1 and answers[0] == answers[1]:
        raise DataError(f"{row.place}: {data.response_key} and {data.rejected_key} are the same")
    return replace(row, meta=row.meta | {ANSWERS: answers})


def _said(messages: Messages, row: Prompt, where: str) -> Messages:
    """The messages up to the assistant's last one."""
    while messages and messages[-1]["role"] != "assistant":  # nobody answers these
        messages = messages[:-1]
    if not messages:
        raise DataError(
            f"{row.place} has no response ({where} has no message of the assistant); see data.prompt_key and "
            "data.response_key"
        )
    for message in messages:
        empty = not in_texts([message])[0].get("content", "").strip() and not message.get("tool_calls")
        if message["role"] == "assistant" and empty:
            raise DataError(f"{row.place}: a message of the assistant is empty")
    return list(map(_with_objects, messages))


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message, with arguments of its calls that are JSON texts, as in OpenAI's format, as the objects in them: a
    template would quote a text.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function: Any = call.get("function") if isinstance(call, dict) else None
        text = function.get("arguments") if isinstance(function, dict) else None
        value = json_object(text) if isinstance(text, str) else None
        calls.append(call if value is None else {**call, "function": {**function, "arguments": value}})
    return {**message, "tool_calls": calls} if calls else message


def read_answers(rows: list[Prompt], policy: LMPolicy, *, first: bool) -> list[Prompt]:
    """Tokenize what follows the prompts of `split_answers`; too many tokens are filtered, cut or refused according to
    data.overlong_prompts. Raises DataError for a response that the chat template does not render. first: whether this
    rank warns.
    """
    key, limit, overlong = "data.train_files", policy.data.max_response_length, policy.data.overlong_prompts
    groups: dict[str, list[tuple[Prompt, Messages]]] = {}
    plain = [row for row in rows if row.messages is None and not row.text]
    read: dict[int, list[Answer]] = dict(zip(map(id, plain), _read_texts(plain, policy), strict=True))  # by row
    for row in rows:
        for messages in () if id(row) in read else row.meta[ANSWERS]:
            groups.setdefault(json.dumps(_tools(row), default=str), []).append((row, messages))
    for group in groups.values():
        for (row, _), answer in zip(group, _read_group(group, policy), strict=True):
            read.setdefault(id(row), []).append(answer)
    kept = []
    for row in rows:
        answers = read[id(row)]
        longest = max(len(answer.tokens) for answer in answers)
        if longest > limit and overlong == "error":
            raise above_limit(f"{row.place}: its response", f"{longest} tokens", "data.max_response_length", limit)
        if longest <= limit or overlong == "truncate":
            kept.append(replace(row, meta=row.meta | {ANSWERS: [answer.cut(limit) for answer in answers]}))
    if not kept:
        raise DataError(f"{key}: all {len(rows)} responses are longer than data.max_response_length={limit}")
    if first and len(kept) < len(rows):
        text = "%s: %d of %d responses have more than %d tokens and are left out"
        log.warning(text, key, len(rows) - len(kept), len(rows), limit)
    return kept


def _tools(row: Prompt) -> list[dict[str, Any]]:
    tools = row.meta.get("tools")
    return tools if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) else []


def _read_texts(rows: Sequence[Prompt], policy: LMPolicy) -> Iterator[list[Answer]]:
    """The answers of plain texts: all their tokens after the first one, and the end token."""
    texts = [row.meta[ANSWERS][0][0]["content"] for row in rows]
    for row, text, tokens in zip(rows, texts, policy.tokenizer(texts)["input_ids"] if texts else (), strict=True):
        policy.check_embedded(tokens, f"{row.place}: its response")
        tokens = [*tokens, policy.tokenizer.eos_token_id]
        yield [Answer(tokens[1:], [True] * (len(tokens) - 1), 1, 0, text, prompt=tokens[:1])]


def _read_group(group: Sequence[tuple[Prompt, Messages]], policy: LMPolicy) -> Iterator[Answer]:
    """The answers of prompts with the same tools."""
    tools, spoken, calls = _tools(group[0][0]), list[tuple[Prompt, Messages, int]](), 1
    for row, rest in group:
        for place, message in enumerate(rest):
            if message["role"] == "assistant":
                spoken.append((row, rest, place))
                calls = max(calls, len(message.get("tool_calls") or ()))
    turns = iter(_turn_tokens(spoken, tools, policy))
    if len(spoken) == len(group):  # each has one turn
        for row, rest in group:
            yield _joined(row, rest, [next(turns)], policy, None)
        return
    data, path = policy.data, policy.config.path
    with closing(TurnRenderer(policy.tokenizer, data, path, tools, policy.ends, calls=calls)) as renderer:
        for row, rest in group:
            theirs = [next(turns) for message in rest if message["role"] == "assistant"]
            yield _joined(row, rest, theirs, policy, renderer)


def _turn_tokens(
    spoken: Sequence[tuple[Prompt, Messages, int]], tools: list[dict[str, Any]], policy: LMPolicy
) -> Iterator[Spoken]:
    """The tokens of each turn, the message at a place of what follows a prompt, with its end token."""
    tokenizer, data, path = policy.tokenizer, policy.data, policy.config.path
    marks: list[Spans] = [[] for _ in spoken]
    if tokenizer.chat_template is None:
        texts = [rest[place]["content"] for _, rest, place in spoken]
    else:
        asked: list[dict[str, Any]] = []
        for row, rest, place in spoken:
            messages = with_system_prompt([*chat_messages(row), *rest[:place]], data.system_prompt)
            asked.append({"messages": messages, "tools": tools or None})
            whole = [*messages, rest[place]]
            asked.append({"messages": whole, "tools": tools or None, "add_generation_prompt": False, **MARKS})
        with closing(ChatRenderer(template_of(tokenizer, tools or None, path), tokenizer, data, path)) as renderer:
            rendered = renderer.texts(asked)
        texts, marks = [], []
        for (row, _, _), before, marked_text in zip(spoken, rendered[::2], rendered[1::2], strict=True):
            after, spans = _without_marks(marked_text)
            if not after.startswith(before):
                raise DataError(
                    f"{row.place}: {renderer.name} does not render the assistant's message behind its own generation "
                    "prompt; expected one that does, or data.chat_template_kwargs with which it does"
                )
            texts.append(after[len(before) :])
            marks.append([(max(a - len(before), 0), b - len(before)) for a, b in spans if b >= len(before)])
    for (row, _, _), (tokens, trained) in zip(spoken, _tokens(texts, marks, tokenizer), strict=True):
        end = next((place for place, token in enumerate(tokens) if token in policy.ends), len(tokens))
        if policy.decode(tokens[end:]).strip():
            raise DataError(f"{row.place}: a message of the assistant contains an end token of the model")
        policy.check_embedded(tokens, f"{row.place}: its response")
        tokens, trained = tokens[: end + 1], trained[: end + 1]
        yield (tokens, trained) if end < len(tokens) else ([*tokens, tokenizer.eos_token_id], [*trained, True])


def _without_marks(text: str) -> tuple[str, Spans]:
    """The text without MARKS, and where they begin and end in it."""
    plain, spans, first = "", list[tuple[int, int]](), None
    begin, end = MARKS.values()
    for piece in re.split(f"([{begin}{end}])", text):
        if piece == begin:
            first = len(plain) if first is None else first
        elif piece == end:
            spans += [] if first is None else [(first, len(plain))]
            first = None
        else:
            plain += piece
    return plain, spans if first is None else [*spans, (first, len(plain))]


def _tokens(texts: Sequence[str], marks: Sequence[Spans], tokenizer: Any) -> Iterator[Spoken]:
    """The tokens of texts, and which have a marked character; all of a text without marks."""
    marked = tokenizer.is_fast and any(marks)
    encoded = tokenizer(list(texts), add_special_tokens=False, return_offsets_mapping=marked)
    for place, tokens in enumerate(encoded["input_ids"]):
        trained = [True] * len(tokens)
        if marked and marks[place]:
            for i, (first, last) in enumerate(encoded["offset_mapping"][place]):
                trained[i] = any(max(a, first) < min(b, last) for a, b in marks[place])
        yield tokens, trained


def _joined(
    row: Prompt, rest: Messages, turns: Sequence[Spoken], policy: LMPolicy, renderer: TurnRenderer | None
) -> Answer:
    """The turns, and the tokens between them."""
    tokens: list[int] = []
    sampled: list[bool] = []
    spoken = [place for place, message in enumerate(rest) if message["role"] == "assistant"]
    history = in_texts(chat_messages(row))
    for (turn, trained), place, following in zip(turns, spoken, [*spoken[1:], len(rest)], strict=True):
        for token, counts in zip(turn, trained, strict=True):
            readable = policy.readable([token])
            tokens += readable
            sampled += [counts] * len(readable)
        between = in_texts(rest[place + 1 : following])
        if following < len(rest):
            if renderer is None or not between:
                raise DataError(f"{row.place}: a message of the assistant follows another; expected one in between")
            history = [*history, *in_texts([rest[place]])]
            answer = policy.readable(renderer.answer(between, history, turn[-1]))
            history = [*history, *between]
            tokens += answer
            sampled += [False] * len(answer)
    calls = sum(len(rest[place].get("tool_calls") or ()) for place in spoken)
    return Answer(tokens, sampled, len(spoken), calls, policy.decode(turns[-1][0]))
