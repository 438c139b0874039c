"""Requests with given uniform numbers, drawn in a session of a model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.policy_session import PolicySession
from phalanx.rollout.lm.session import Request, StopTexts, converse


def asked(
    prompts: Sequence[list[int]],
    rows: Sequence[int],
    uniform: Tensor,
    how: Decoding,
    room: Sequence[int] = (),
    stops: Sequence[StopTexts] = (),
) -> list[Request]:
    """A request for each of `rows`, indices into `prompts`, with uniform numbers [B, limit]."""
    requests = []
    for i, row in enumerate(rows):
        options: dict[str, Any] = {"room": room[i] if room else how.limit, "stops": stops[i] if stops else None}
        requests.append(Request(prompt=prompts[row], name=(i,), decoding=how, **options))
        vars(requests[-1])["numbers"] = uniform[i].contiguous()
    return requests


def decode(
    model: Any,
    prompts: Sequence[list[int]],
    rows: Sequence[int],
    uniform: Tensor,
    how: Decoding,
    stops: Sequence[StopTexts] = (),
    together: int = 10**6,
) -> list[list[int]]:
    """The responses of a CausalLM, of which at most `together` are drawn at once."""
    requests = asked(prompts, rows, uniform, how, stops=stops)
    converse(PolicySession(model, model.lm.config, torch.device("cpu"), together), requests)
    return [request.tokens for request in requests]
