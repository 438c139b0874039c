"""Prompts of flow models that are longer than what the text encoder reads (`data.overlong_prompts`)."""

import logging
from collections.abc import Callable
from typing import Any

from phalanx.config.messages import cut
from phalanx.data.prompts import DataError, PromptRow
from phalanx.models.flow.family import FlowModel

log = logging.getLogger(__name__)


def fitting(
    rows: list[PromptRow], key: str, model: FlowModel, data: Any, *, first: bool, named: Callable[[str], str] = str
) -> list[PromptRow]:
    """The rows to use, as data.overlong_prompts wants it; `first`: this rank says how many are cut or left out.

    `key` lists the files of the rows, and `named(text)` is a message with the job's keys. Raises DataError for
    a longer prompt under `error`, and where none is left.
    """
    tokenizer, tokens, limit = model.text_tokens([row.text for row in rows], data.max_prompt_length)
    overlong = [i for i in range(len(rows)) if len(tokens[i]) > limit]
    if not overlong:
        return rows
    needed = max(map(len, tokens))
    remedy = named(f"data.max_prompt_length={needed} holds all")
    if limit < data.max_prompt_length:
        remedy = named(f"the text encoders of model.path read no more than {limit}")
    where = f"prompt {overlong[0]} ({cut(repr(rows[overlong[0]].text))})"
    count = f"{key}: {len(overlong)} of {len(rows)} prompts have more than {limit} tokens"
    if data.overlong_prompts == "error":
        raise DataError(f"{count}, first {where}; {remedy}, or set data.overlong_prompts to filter or truncate")
    if data.overlong_prompts == "filter":
        if len(overlong) == len(rows):
            raise DataError(f"{count}, and data.overlong_prompts=filter leaves none; {remedy}")
        if first:
            log.warning("%s and are left out, first %s; %s", count, where, remedy)
        return [row for row, ids in zip(rows, tokens, strict=True) if len(ids) <= limit]
    lost = 0  # prompts whose ground truth is in the part that the model does not see
    for i in overlong:
        truth = _plain(rows[i].meta.get("ground_truth", ""))
        lost += truth in _plain(rows[i].text) and truth not in _plain(tokenizer.decode(tokens[i][:limit]))
    unseen = f"; the ground truth of {lost} of them is in the part that is cut off" if lost else ""
    if first:
        log.warning("%s and are cut there, first %s%s; %s", count, where, unseen, remedy)
    return rows


def _plain(text: Any) -> str:
    """Without case and spaces, which tokenizers change."""
    return "".join(str(text).lower().split())
