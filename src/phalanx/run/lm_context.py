"""Prompts of a teacher that is the policy itself, with texts of the data or of the samples beside the student's."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, takewhile
from typing import Any

from torch import Tensor

from phalanx.data.data_files import DataError
from phalanx.data.prompts import MARK, message_parts
from phalanx.data.unusable import context_of
from phalanx.distributed.collectives import all_gather_rows, on_all_ranks
from phalanx.environments.texts import in_texts, shortened
from phalanx.models.lm.chat import chat_messages, prompt_tokens
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.model import positions
from phalanx.types import Prompt, Samples

FORMS = {
    "column": "{text}",
    "peer": "This is a correct response:\n\n{text}",
    "environment": "These were the answers to an earlier attempt:\n\n{text}",
    "reward": "This is feedback on an earlier attempt:\n\n{text}",
}
THOUGHTS = re.compile(r"<think>.*?</think>\s*", re.DOTALL)  # left out of demonstrations
SLACK = 8  # tokens that a text cut at a token may have more when it is read again


def with_column(rows: list[Prompt], policy: LMPolicy, config: Any) -> list[Prompt]:
    """The rows with the tokens that a ContextTeacher reads, if its context is a column of the data alone, and none has
    images. Raises DataError for a row without the text, or with a text that is too long for the model.
    """
    result = []
    texts = list(map(partial(context_of, key=config.context_key), rows))
    for row, tokens in zip(rows, _told(rows, texts, policy, config), strict=True):
        longest = positions(policy.settings)
        length = len(tokens) + policy.data.max_response_length
        if longest is not None and length > longest:
            raise DataError(
                f"{row.place}: with {config.context_key}, the teacher's prompt and the longest response have {length} "
                f"tokens, and the model has {longest} positions; lower data.max_response_length"
            )
        result.append(replace(row, told=tuple(tokens)))
    return result


def check_rows(rows: list[Prompt], config: Any) -> None:
    """Raise DataError for a row without the text of the context's column, if it has one."""
    if "column" in config.context:
        for row in rows:
            context_of(row, config.context_key)


class Contexts:
    """Gives this rank's samples the tokens that a ContextTeacher reads, from what is known once they have rewards."""

    def __init__(self, policy: LMPolicy, rollout: Any, config: Any) -> None:
        self.policy, self.rollout, self.config = policy, rollout, config
        self._forms = FORMS | config.context_forms

    def __call__(self, samples: Samples, reward: Tensor, feedback: list[str]) -> Samples:
        """See phalanx.training.components.Tell. Raises JobError, on all ranks, for a context that is not rendered."""
        n, drawn = self.rollout.config.n, self.rollout.drawn
        responses: list[str] = []  # of all ranks
        if "peer" in self.config.context:
            for each in drawn:
                responses.append(THOUGHTS.sub("", self.policy.decode(list(each.response))).strip())
            responses = list(chain(*all_gather_rows(responses)))
        right = (reward >= self.config.success_reward_threshold).tolist()
        asked, texts = [], []
        for prompt, each, number in zip(samples.prompts, drawn, samples.index.tolist(), strict=True):
            messages = each.beside.get("messages", [])  # with what the environment's reset has added to the prompt
            first = list(takewhile(lambda message: message["role"] != "assistant", messages))
            if prompt.images and sum(message["content"].count(MARK) for message in first) != len(prompt.images):
                first = []  # a text of the environment has a mark, too
            asked.append(replace(prompt, messages=first or prompt.messages))
            answers = [message["content"] for message in messages[len(first) :] if message["role"] != "assistant"]
            known = {"environment": "\n".join(answers)}
            known["reward"] = feedback[number] if feedback else ""
            known["peer"] = _peer_response(number, n, right, responses) if responses else ""
            known["column"] = context_of(prompt, self.config.context_key) if "column" in self.config.context else ""
            parts = []
            for source in self.config.context:
                if known[source].strip():
                    parts.append(self._forms[source].format(text=known[source].strip()))
            texts.append("\n\n".join(parts))
        told = on_all_ranks(lambda: self._fitting_prompts(asked, texts))
        prompts = []
        for prompt, tokens in zip(samples.prompts, told, strict=True):
            prompts.append(replace(prompt, told=tokens))
        return replace(samples, prompts=prompts)

    def _fitting_prompts(self, asked: list[Prompt], texts: list[str]) -> list[tuple[int, ...]]:
        """The teacher's prompts, none for samples without a text. What is too long for the model's positions is cut."""
        policy, longest = self.policy, positions(self.policy.settings)
        told: list[tuple[int, ...]] = [()] * len(texts)
        places = [place for place, text in enumerate(texts) if text]
        for _ in range(2):
            rendered = _told([asked[i] for i in places], [texts[i] for i in places], policy, self.config)
            long = []
            for place, tokens in zip(places, rendered, strict=True):
                excess = 0 if longest is None else len(tokens) + policy.data.max_response_length - longest
                told[place] = tuple(tokens) if excess <= 0 else ()
                if excess > 0:
                    length = len(policy.tokenizer(texts[place], add_special_tokens=False)["input_ids"])
                    texts[place] = _cut(texts[place], max(length - excess - SLACK, 0), policy)
                    long.append(place)
            places = [place for place in long if texts[place]]
        return told


def _peer_response(number: int, n: int, right: Sequence[bool], responses: Sequence[str]) -> str:
    """The next successful response after sample `number` in its group; none but its own: an empty text."""
    first = number // n * n
    for step in range(1, n):
        other = (number - first + step) % n + first
        if right[other]:
            return responses[other]
    return ""


def _cut(text: str, limit: int | None, policy: LMPolicy) -> str:
    """The text with at most `limit` tokens, without its middle."""
    if limit is None:
        return text
    tokens = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    return text if len(tokens) <= limit else str(policy.tokenizer.decode(shortened(tokens, limit, "middle")))


def _told(rows: list[Prompt], contexts: list[str], policy: LMPolicy, config: Any) -> list[list[int]]:
    """The tokens of prompts whose last message of the user is the template, filled with it and with a context."""
    filled = []
    for row, context in zip(rows, contexts, strict=True):
        if row.images:  # spelled out in a text, these stand for no image
            for mark in (MARK, *policy.tokenizer.convert_ids_to_tokens(policy.trained.module.never)):
                context = context.replace(mark, "")
        messages = in_texts(chat_messages(row))
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        context = _cut(context, config.max_context_length, policy)
        text = config.teacher_prompt_template.format(prompt=messages[last]["content"], context=context)
        messages[last] = {**messages[last], "content": text}
        if row.images:
            messages = [message | {"content": message_parts(message["content"])} for message in messages]
        filled.append(replace(row, text=text, messages=messages))
    return list(_tokens(filled, policy))


def _tokens(rows: list[Prompt], policy: LMPolicy) -> Iterator[list[int]]:
    """The tokens of each prompt; not by policy.encode, which may cut prompts. Raises ValueError for one of no row."""
    plain, shown = list[Prompt](), list[Prompt]()
    for row in rows:
        (shown if row.images else plain).append(row)
    if policy.reader is not None:
        plain = policy.reader.in_parts(plain)
        policy.reader.render(shown, policy.data)
    texts = iter(prompt_tokens(policy.tokenizer, plain, policy.data, policy.config.path))
    for row in rows:
        tokens = policy.reader.read(row, policy.data)[0] if row.images else policy.readable(next(texts))
        policy.check_embedded(tokens, f"{row.place}: the teacher's prompt")
        yield tokens
