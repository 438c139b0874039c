"""Sequences of different lengths side by side in one row, without padding, each of which attends only to itself.

With flash-attention that is its kernel for variable lengths; with eager and FlexAttention transformers makes the mask
from positions that begin anew. With torch's own kernels each sequence is a separate call: the mask of a whole row
would take the square of its length, in memory and arithmetic.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED_SDPA = "phalanx_packed_sdpa"
_ATTENDS = ("full_attention", "sliding_attention")


def implementation(name: str) -> str:
    """The attention that packs where `name`, that of model.attn_implementation, is asked for."""
    return PACKED_SDPA if name == "sdpa" else name


def check(lm: Any) -> None:
    """Raise ValueError for a model in which a sequence would see its neighbors all the same."""
    kinds = lm.config.to_dict().get("layer_types") or ()
    other = sorted({kind for kind in kinds if kind not in _ATTENDS})
    if other or lm._is_stateful:
        raise ValueError(
            f"model.use_remove_padding: true needs layers of attention, and {lm.config.model_type} has others"
            f"{f' ({other[0]})' if other else ''}; set it to false"
        )


def arguments(lm: Any, lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Arguments of a decoder beside the tokens [1, sum of lengths] of sequences of these lengths."""
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)[None]
    kind = lm.config._attn_implementation
    if kind == PACKED_SDPA:
        # a mask of four dims is left as it is; should a model lose `sequences`, it shows at once
        lost = torch.full((1, 1, 1, 1), torch.nan, device=device)
        return {"position_ids": positions, "attention_mask": lost, "sequences": list(lengths)}
    if not kind.startswith("flash"):
        return {"position_ids": positions}
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
    # without these each layer would look for them in the positions, and wait for the device
    names = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}
    return {"position_ids": positions, **names}


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, [1, heads, N, d] -> [1, N, heads, d]; without `sequences`, that of sdpa."""
    if sequences is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    parts = []
    for q, k, v in zip(*(states.split(list(sequences), 2) for states in (query, key, value)), strict=True):
        mask = None
        if sliding_window is not None and q.shape[2] > sliding_window:
            mask = _band(q.shape[2], sliding_window, q.device)
        parts.append(sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(parts, 1), None


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[1, 1, length, length] bool: each token, and window - 1 before it."""
    ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)
