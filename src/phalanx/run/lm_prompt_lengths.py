"""Prompts of language models that are too long (data.overlong_prompts)."""

import logging

from phalanx.data.unusable import UnusableRows
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.types import Prompt

log = logging.getLogger(__name__)


def fitting_prompts(rows: list[Prompt], key: str, policy: LMPolicy, *, first: bool) -> list[Prompt]:
    """Return the rows to train on, according to data.overlong_prompts.

    Raises ValueError for a prompt that is too long if data.overlong_prompts is `error`, and if no row is left.
    """
    limit, overlong = policy.data.max_prompt_length, policy.data.overlong_prompts
    kept, drop = [], UnusableRows(key, policy.data.unusable_rows)
    policy.encode_ahead(rows)
    for number, row in enumerate(rows):
        try:
            length = policy.length(row)
        except ValueError as error:  # an image that the model does not take, such as one of 300 to 1
            drop(error)
            continue
        if length <= limit:
            kept.append(row)
        elif row.images and overlong != "filter":
            smaller = "lower data.max_pixels, " if policy.vision.family.sizes else ""
            raise ValueError(
                f"{row.place}: it has {length} tokens with the chat template, {policy.look(row).count} of "
                f"them of its images, more than data.max_prompt_length={limit}, and images are not cut; raise that, "
                f"{smaller}or set data.overlong_prompts to filter"
            )
        elif overlong == "error":
            raise ValueError(
                f"{row.place or f'{key}, prompt {number}'}: it has {length} tokens with the chat template, more than "
                f"data.max_prompt_length={limit}; raise that, or set data.overlong_prompts to filter or truncate"
            )
    drop.report(len(rows) - len(drop.reasons))
    if not kept:
        raise ValueError(f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit}")
    dropped = len(rows) - len(drop.reasons) - len(kept)
    if first and dropped:
        log.warning("%s: %d of %d prompts have more than %d tokens and are left out", key, dropped, len(rows), limit)
    return kept
