"""Responses of the data instead of sampled ones, for supervised training with the same loop.

The tokens of a response are those that the policy would have sampled: a turn of the assistant is what the chat template
renders of it behind the generation prompt, up to its end token, and what lies between turns is rendered as in
conversations (phalanx.models.lm.turns). Only turns are trained.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from phalanx.config.engine_facts import EngineFacts
from phalanx.data.data_files import DataError
from phalanx.data.prompts import answer_of
from phalanx.data.unusable import UnusableRows
from phalanx.distributed.collectives import on_all_ranks
from phalanx.environments.texts import in_texts
from phalanx.functional.tokens import TokenTrace
from phalanx.models.lm.chat import ChatRenderer, chat_messages, template_of, with_system_prompt
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.turns import TurnRenderer
from phalanx.rollout.lm.conversations import Conversed, marked
from phalanx.rollout.lm.in_policy import LMRollout, measured
from phalanx.types import Each, Prompt, Samples

log = logging.getLogger(__name__)
ANSWER = "phalanx_answer"  # key of a prompt's meta: the messages after it, later the Answer
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """The tokens after a prompt; `sampled` marks those of the assistant, in `turns` turns with `calls` calls of tools.
    `text`: that of the last turn. `truncated`: cut at data.max_response_length.
    """

    tokens: list[int]
    sampled: list[bool]
    turns: int
    calls: int
    text: str
    truncated: bool = False


class DatasetRollout(LMRollout):
    """See phalanx.types.Rollout. Validation samples from the policy. Prompts come from `read_answers`."""

    facts = EngineFacts(weights="none", redraws=False)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Do not gather the policy's weights, which reading the data does not need."""
        with torch.no_grad():
            yield

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        """Return this rank's share of the data's responses; `prompts` are those of all ranks.

        Raises JobError, on all ranks, if an image cannot be read.
        """
        share, n = len(prompts) * self.config.n // self.world.data_size, self.config.n
        index = torch.arange(self.world.data_rank * share, (self.world.data_rank + 1) * share)
        local = [prompts[i // n] for i in index.tolist()]
        self._drawn = list(on_all_ranks(lambda: list(map(self._read, local))))
        plain: list[Prompt] = []
        for prompt in local:
            plain.append(replace(prompt, meta={name: prompt.meta[name] for name in prompt.meta if name != ANSWER}))
        for start in range(0, share, self.micro_batch_size):
            part = slice(start, start + self.micro_batch_size)
            pairs = zip(plain[part], self._drawn[part], strict=True)
            each([drawn.text for drawn in self._drawn[part]], [measured(*pair, self.how) for pair in pairs])
        return self._samples(plain, index)

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        """As LMRollout."""
        with self.policy.unsharded():  # `awake` does not gather the weights
            super().sample_validation(prompts, each=each)

    def _read(self, prompt: Prompt) -> Conversed:
        answer: Answer = prompt.meta[ANSWER]
        return Conversed(
            self.policy.encode(prompt),
            answer.tokens,
            answer.text,
            answer.truncated,
            look=self.policy.look(prompt),
            sampled=answer.sampled,
            ended="tokens" if answer.truncated else "done",
            turns=answer.turns,
            calls=answer.calls,
            mistakes=0,
            failures=0,
            seconds=0.0,
            earned={},
        )

    def _trace(self, ids: Tensor, starts: Tensor, lengths: Tensor, width: int) -> TokenTrace:
        trace: TokenTrace = super()._trace(ids, starts, lengths, width)
        read: list[Any] = self._drawn
        return trace if self.talks is not None else marked(trace, read)


def split_answers(rows: list[Prompt], response_key: str | None, unusable: str) -> list[Prompt]:
    """Split each row into a prompt and what follows it, which `read_answers` reads: the text or chat in the column
    `response_key`, or without that the chat from the assistant's first message on. Raises DataError for a row without a
    response, unless `unusable` (data.unusable_rows) is `filter`.
    """
    result, drop = [], UnusableRows("data.train_files", unusable)
    for row in rows:
        try:
            result.append(_split_row(row, response_key))
        except DataError as error:
            drop(error)
    drop.report(len(result))
    return result


def _split_row(row: Prompt, response_key: str | None) -> Prompt:
    messages = chat_messages(row)
    if response_key is None:
        first = list(takewhile(lambda message: message["role"] != "assistant", messages))
        rest = messages[len(first) :]
        while rest and rest[-1]["role"] != "assistant":  # nobody answers these
            rest = rest[:-1]
        missing = "its chat has no message of the assistant"
    else:
        text = answer_of(row.meta.get(response_key), response_key, row.place)
        first, rest = messages, [] if text is None else [{"role": "assistant", "content": text}]
        missing = f"no text or chat in the column {response_key}"
    if not rest:
        raise DataError(f"{row.place} has no response ({missing}); see data.prompt_key and data.response_key")
    if not first:
        raise DataError(f"{row.place}: its chat begins with the assistant; expected a message to be answered")
    for message in rest:
        empty = not in_texts([message])[0].get("content", "").strip() and not message.get("tool_calls")
        if message["role"] == "assistant" and empty:
            raise DataError(f"{row.place}: a message of the assistant is empty")
    if row.messages is None and response_key is not None:
        return replace(row, meta=row.meta | {ANSWER: rest})
    users = [message for message in in_texts(first) if message["role"] == "user"]
    return replace(row, messages=first, text=users[-1]["content"] if users else "", meta=row.meta | {ANSWER: rest})


def read_answers(rows: list[Prompt], policy: LMPolicy, *, first: bool) -> list[Prompt]:
    """Tokenize what follows the prompts of `split_answers`; too many tokens are filtered, cut or refused according to
    data.overlong_prompts. Raises DataError for a response that the chat template does not render. first: whether this
    rank warns.
    """
    key, limit, overlong = "data.train_files", policy.data.max_response_length, policy.data.overlong_prompts
    groups: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(json.dumps(_tools(row), default=str), []).append(number)
    answers: dict[int, Answer] = {}
    for numbers in groups.values():
        some = [rows[number] for number in numbers]
        answers |= zip(numbers, _read_group(some, policy), strict=True)
    kept = []
    for number, row in enumerate(rows):
        answer = answers[number]
        length = len(answer.tokens)
        if length > limit and overlong == "error":
            raise DataError(
                f"{row.place}: its response has {length} tokens, more than data.max_response_length={limit}; raise "
                "that, or set data.overlong_prompts to filter or truncate"
            )
        if length > limit and overlong == "filter":
            continue
        if length > limit:
            answer = replace(answer, tokens=answer.tokens[:limit], sampled=answer.sampled[:limit], truncated=True)
        kept.append(replace(row, meta=row.meta | {ANSWER: answer}))
    if not kept:
        raise DataError(f"{key}: all {len(rows)} responses are longer than data.max_response_length={limit}")
    if first and len(kept) < len(rows):
        text = "%s: %d of %d responses have more than %d tokens and are left out"
        log.warning(text, key, len(rows) - len(kept), len(rows), limit)
    return kept


def _tools(row: Prompt) -> list[dict[str, Any]]:
    tools = row.meta.get("tools")
    return tools if isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools) else []


def _read_group(rows: Sequence[Prompt], policy: LMPolicy) -> list[Answer]:
    """The answers of rows with the same tools."""
    tokenizer, tools, path = policy.tokenizer, _tools(rows[0]), policy.config.path
    chats = list(map(chat_messages, rows))
    spoken: list[tuple[int, int]] = []  # of each turn: its row, and its place in what follows the prompt
    for number, row in enumerate(rows):
        for place, message in enumerate(row.meta[ANSWER]):
            if message["role"] == "assistant":
                spoken.append((number, place))
    turns = dict(zip(spoken, _turn_tokens(rows, chats, spoken, policy), strict=True))
    several = max(sum(message["role"] == "assistant" for message in row.meta[ANSWER]) for row in rows) > 1
    if not several:
        return [_joined(row, number, turns, policy, None) for number, row in enumerate(rows)]
    calls = max(len(message.get("tool_calls") or ()) for row in rows for message in row.meta[ANSWER])
    renderer = TurnRenderer(tokenizer, policy.data, path, tools, policy.ends, calls=max(calls, 1))
    with closing(renderer):
        return [_joined(row, number, turns, policy, renderer) for number, row in enumerate(rows)]


def _turn_tokens(
    rows: Sequence[Prompt], chats: Sequence[Messages], spoken: Sequence[tuple[int, int]], policy: LMPolicy
) -> Iterator[list[int]]:
    """The tokens of each turn, with its end token."""
    tokenizer, data, path = policy.tokenizer, policy.data, policy.config.path
    if tokenizer.chat_template is None:
        texts = [rows[number].meta[ANSWER][place]["content"] for number, place in spoken]
    else:
        tools = _tools(rows[0]) or None
        asked: list[dict[str, Any]] = []
        for number, place in spoken:
            rest = rows[number].meta[ANSWER]
            messages = with_system_prompt([*chats[number], *rest[:place]], data.system_prompt)
            asked.append({"messages": messages, "tools": tools})
            asked.append({"messages": [*messages, rest[place]], "tools": tools, "add_generation_prompt": False})
        with closing(ChatRenderer(template_of(tokenizer, tools, path), tokenizer, data, path)) as renderer:
            rendered = renderer.texts(asked)
        texts = []
        for (number, _), before, after in zip(spoken, rendered[::2], rendered[1::2], strict=True):
            if not after.startswith(before):
                raise DataError(
                    f"{rows[number].place}: {renderer.name} does not render the assistant's message behind its own "
                    "generation prompt; expected one that does, or data.chat_template_kwargs with which it does"
                )
            texts.append(after[len(before) :])
    every = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    for (number, _), tokens in zip(spoken, every, strict=True):
        end = next((place for place, token in enumerate(tokens) if token in policy.ends), len(tokens))
        if policy.decode(tokens[end:]).strip():
            raise DataError(f"{rows[number].place}: a message of the assistant contains an end token of the model")
        if max(tokens, default=0) >= policy.rows:
            token = tokenizer.convert_ids_to_tokens(max(tokens))
            raise DataError(f"{rows[number].place}: its response contains {token!r}, which the model does not embed")
        yield [*tokens[:end], tokens[end] if end < len(tokens) else tokenizer.eos_token_id]


def _joined(
    row: Prompt, number: int, turns: dict[tuple[int, int], list[int]], policy: LMPolicy, renderer: TurnRenderer | None
) -> Answer:
    """A row's turns, and the tokens between them."""
    rest: Messages = row.meta[ANSWER]
    tokens: list[int] = []
    sampled: list[bool] = []
    spoken = [place for place, message in enumerate(rest) if message["role"] == "assistant"]
    history = in_texts(chat_messages(row))
    for place, following in zip(spoken, [*spoken[1:], len(rest)], strict=True):
        turn, between = policy.readable(turns[number, place]), in_texts(rest[place + 1 : following])
        tokens += turn
        sampled += [True] * len(turn)
        if following < len(rest):
            if renderer is None or not between:
                raise DataError(f"{row.place}: a message of the assistant follows another; expected one in between")
            history = [*history, *in_texts([rest[place]])]
            answer = policy.readable(renderer.answer(between, history, turn[-1]))
            history = [*history, *between]
            tokens += answer
            sampled += [False] * len(answer)
    calls = sum(len(rest[place].get("tool_calls") or ()) for place in spoken)
    return Answer(tokens, sampled, len(spoken), calls, policy.decode(turns[number, spoken[-1]]))
