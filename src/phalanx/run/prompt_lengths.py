"""Prompts of flow models that are too long for the text encoder (data.overlong_prompts)."""

import logging
from typing import Any

from phalanx.config.flow import FlowRunConfig
from phalanx.config.messages import cut
from phalanx.data.prompts import DataError
from phalanx.models.flow.family import FlowModel
from phalanx.types import Prompt

log = logging.getLogger(__name__)


def fitting(rows: list[Prompt], key: str, model: FlowModel, cfg: FlowRunConfig, *, first: bool) -> list[Prompt]:
    """The rows to use according to data.overlong_prompts.

    key: the configuration key of the rows' files. first: whether this rank logs how many prompts are cut or left out.
    Raises DataError for an overlong prompt if data.overlong_prompts is `error`, and if no row is left.
    """
    data = cfg.data
    tokenizer, tokens, limit = model.text_tokens([row.text for row in rows], data.max_prompt_length)
    overlong = [i for i in range(len(rows)) if len(tokens[i]) > limit]
    if not overlong:
        return rows
    needed = max(map(len, tokens))
    remedy = f"{data:max_prompt_length}={needed} holds all"
    if limit < data.max_prompt_length:
        remedy = f"the text encoders of {cfg.model:path} read no more than {limit}"
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
    lost = 0  # prompts whose ground truth is only in the part that is cut off
    for i in overlong:
        truth = _plain(rows[i].meta.get("ground_truth", ""))
        lost += truth in _plain(rows[i].text) and truth not in _plain(tokenizer.decode(tokens[i][:limit]))
    unseen = f"; the ground truth of {lost} of them is in the part that is cut off" if lost else ""
    if first:
        log.warning("%s and are cut there, first %s%s; %s", count, where, unseen, remedy)
    return rows


def _plain(text: Any) -> str:
    """The text without case and whitespace, which tokenizers may change."""
    return "".join(str(text).lower().split())
