"""Decoding steps that the jobs of a meeting share: one pass reads the weights for the samples of all of them.

Each job keeps its own rows of keys and values and attends to them as it would alone; everything else in a layer
computes the tokens of all jobs as one batch, with the rows of each job through its own LoRA.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from phalanx.models.fused_lora import FusedLinear
from phalanx.models.lm.kv_rows import CACHE, holds_rows
from phalanx.models.meeting import Seat, adapters, here
from phalanx.models.trained import TrainedModel

JOINED = "phalanx_joined"
Step = tuple[TrainedModel, dict[str, Any]]  # a model, and the keywords of its module's forward


def decoding_forward(trained: TrainedModel) -> Callable[..., Any]:
    """The forward by which a sampling session decodes: that of the module of `trained`, a CausalLM, whose steps join
    those of other jobs of a meeting.
    """
    seat, module = here(), trained.module
    config = module.lm.config.get_text_config(decoder=True)
    apart = "sdpa" in config._attn_implementation and not config.to_dict().get("num_kv_shared_layers")
    if seat is None or trained.world.shard_size > 1 or not apart:
        return module
    return partial(_forward, seat, trained)


def _forward(seat: Seat, trained: TrainedModel, **given: Any) -> Any:
    if not holds_rows(given.get(CACHE)):  # prompts are read alone
        return trained.module(**given)
    lora_off = next(
        (part._disable_adapters for part in trained.module.modules() if isinstance(part, FusedLinear)), True
    )
    key = "decode", given["input_ids"].shape[1], lora_off, given["logits_to_keep"]
    return seat.ask(key, (trained, given), _joined_pass)


def _joined_pass(steps: Sequence[Step]) -> list[Any]:
    """The outputs, with `logits`, of a pass over the tokens of all jobs."""
    trained, given = steps[0]
    if len(steps) == 1:
        return [trained.module(**given)]
    parts, rows = [], {}
    for other, step in steps:
        rows[other.adapter] = len(step["input_ids"])
        parts.append((step[CACHE], step["attention_mask"]))
    names = ("input_ids", "position_ids")
    joined: dict[str, Any] = {name: torch.cat([step[name] for _, step in steps]) for name in names}
    # transformers passes a 4D mask on unchanged; in a model that drops the parts, it makes all outputs NaN
    joined["attention_mask"] = torch.full((1, 1, 1, 1), torch.nan, device=joined["input_ids"].device)
    config = trained.module.lm.config.get_text_config(decoder=True)
    kind, config._attn_implementation = config._attn_implementation, JOINED
    try:
        with adapters(rows):
            out = trained.module(**joined, parts=parts, use_cache=False, logits_to_keep=given["logits_to_keep"])
    finally:
        config._attn_implementation = kind
    return [SimpleNamespace(logits=logits) for logits in out.logits.split(list(rows.values()))]


def _joined_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    parts: Sequence[tuple[Any, Tensor]],
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, [N, heads, Q, d] -> [N, Q, heads, d]: the rows of each of `parts`, a cache and
    a mask, attend to that cache.
    """
    outputs, first = [], 0
    for cache, mask in parts:
        rows = slice(first, first + len(mask))
        keys, values = cache.layers[module.layer_idx].update(key[rows], value[rows])
        outputs.append(sdpa_attention_forward(module, query[rows], keys, values, mask, **kwargs)[0])
        first += len(mask)
    return torch.cat(outputs), None


AttentionInterface.register(JOINED, _joined_attention)
AttentionMaskInterface.register(JOINED, sdpa_mask)
