"""Attention of packed sequences by one call per layer, with torch's varlen_attn (FlashAttention, on NVIDIA GPUs).

The lengths of the sequences are tensors, so that one compiled graph serves all rows.
"""

import inspect
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED_VARLEN = "phalanx_packed_varlen"
WITH_GROUPS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters  # torch 2.12 and later


class Segments(NamedTuple):
    """S sequences in a row of M tokens: of queries, and of the keys that these see.

    ends_q, ends_k: [S + 1] int32, where each ends, after a 0. most_q, most_k: the lengths of the longest. keys: [K],
    the place in the row of each key, where responses see a prompt that they share; None: queries and keys are the same
    tokens.
    """

    ends_q: Tensor
    ends_k: Tensor
    most_q: int
    most_k: int
    keys: Tensor | None

    @classmethod
    def of(cls, groups: Sequence[tuple[int, Sequence[int]]], device: torch.device) -> "Segments":
        """See phalanx.models.lm.packing.Group. A response attends to its prompt, then to itself."""
        queries, seen, spans, at = [], [], [], 0
        for first, rest in groups:
            begin = at
            for length in (first, *rest):
                shared = 0 if at == begin else first
                queries.append(length)
                seen.append(shared + length)
                spans += [torch.arange(begin, begin + shared), torch.arange(at, at + length)]
                at += length
        ends = torch.tensor([[0, *accumulate(queries)], [0, *accumulate(seen)]], dtype=torch.int32).to(device)
        keys = torch.cat(spans).to(device) if queries != seen else None
        return cls(ends[0], ends[1], max(queries), max(seen), keys)


def packed_varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, [R, heads, N, d] -> [R, N, heads, d]; without `segments`, the same as sdpa."""
    if segments is None:
        output: Any = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]
        return output, None
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    if segments.keys is not None:
        k, v = k[segments.keys], v[segments.keys]
    options: dict[str, Any] = {"scale": scaling, "window_size": window}
    if k.shape[1] < q.shape[1]:
        if WITH_GROUPS:
            options["enable_gqa"] = True
        else:
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    given = segments.ends_q, segments.ends_k, segments.most_q, segments.most_k
    output = varlen.varlen_attn(q, k, v, *given, **options)
    return output[None], None


def trial(device: torch.device, dtype: torch.dtype, dim: int) -> None:
    """Run varlen_attn forward and backward for heads of `dim` elements."""
    q = torch.zeros(1, 2, 4, dim, dtype=dtype, device=device, requires_grad=True)
    segments = Segments.of([(2, (1, 1))], device)
    with torch.enable_grad():
        packed_varlen(nn.Module(), q, q[:, :1], q[:, :1], None, segments=segments)[0].sum().backward()
