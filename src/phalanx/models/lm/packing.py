"""Packing: sequences of different lengths in one row, without padding, and rows whose positions are spread over ranks.

Each sequence attends only to itself, or also to a prompt before it that several sequences share.

With flash-attention, packing uses its kernel for variable lengths; with eager and FlexAttention, transformers builds
the mask from position ids that start again at 0. With torch's own kernels it uses varlen_attn where that works (see
phalanx.models.lm.varlen). Elsewhere each sequence is a separate call, because a mask over the whole row would take
memory and FLOPs quadratic in its length.

Ranks that share rows exchange positions for heads around each attention, which then computes some heads of whole rows
(DeepSpeed-Ulysses, arXiv 2309.14509).
"""

import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from phalanx.config.messages import check_divides
from phalanx.distributed.context_parallel import KEY, ContextGroup
from phalanx.distributed.mesh import World
from phalanx.models.compiling import works
from phalanx.models.lm.varlen import PACKED_VARLEN, Segments, packed_varlen, trial

PACKED_SDPA = "phalanx_packed_sdpa"
SHARED_EAGER = "phalanx_shared_eager"
SHARED = {"sdpa": PACKED_SDPA, "eager": SHARED_EAGER}  # for rows that ranks share, by model.attn_implementation
_ATTENDS = ("full_attention", "sliding_attention")
_OF_LENGTH = ("dynamic", "longrope")  # RoPE types whose angles depend on the longest position of a pass


def check(lm: Any, given: str = "model.use_remove_padding: true", advice: str = "set it to false") -> None:
    """Raise ValueError for a model with layers that mix packed sequences or cannot be split by position.

    given: the setting that requires it, for the message.
    """
    kinds = lm.config.to_dict().get("layer_types") or ()
    other = sorted({kind for kind in kinds if kind not in _ATTENDS})
    if other or lm._is_stateful:
        raise ValueError(
            f"{given} needs layers of attention, and {lm.config.model_type} has others"
            f"{f' ({other[0]})' if other else ''}; {advice}"
        )


def settle(model: Any, world: World, dtype: torch.dtype, named: Any) -> None:
    """Choose how a model packs on all ranks: by one call per layer if that works, and not at all if its blocks are
    compiled and each sequence would be a separate call.

    model: a phalanx.models.lm.model.CausalLM that computes in `dtype`. named: section `model`. Raises ValueError if
    it must pack nevertheless.
    """
    lm = model.lm if model.vision is None else model.vision.decoder
    config = lm.config.get_text_config(decoder=True)
    if not model.packs or config._attn_implementation != PACKED_SDPA:
        return
    dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    line = "packed samples take a call of torch's SDPA each, because varlen_attn fails"
    tried = world.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if tried and works(world, line, partial(trial, world.device, dtype, dim)):
        lm.set_attn_implementation(PACKED_VARLEN)
    elif named.compile:
        if not model.tries:
            raise ValueError(
                f"{named:compile}: true would recompile for each pass with {named:use_remove_padding}, whose lengths "
                "differ, because torch's varlen_attn does not work here; set one of the two to false, or "
                f"{named:attn_implementation}=flash_attention_2"
            )
        model.packs = model.groups = False


def spread(lm: Any, context: ContextGroup, name: str) -> None:
    """Let a model's attention exchange positions for heads over the ranks of `context`.

    name: model.attn_implementation. Raises ValueError, in one line, for a model that does not support this.
    """
    given = f"{KEY}: {context.size}"
    check(lm, given, "set it to 1")
    settings = lm.config.to_dict()
    heads = lm.config.num_attention_heads
    check_divides(KEY, context.size, heads, "the model's {} attention heads")
    rope = settings.get("rope_parameters") or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    for kind in _OF_LENGTH:
        if kind in kinds:
            raise ValueError(
                f"{given} does not work with the positions of {lm.config.model_type} (rope_type {kind}), whose angles "
                "depend on the longest of a pass; set it to 1"
            )
    lm.set_attn_implementation(SHARED[name])


# length of a sequence, and lengths of the sequences after it that each attend to it and to themselves
Group = tuple[int, Sequence[int]]


@dataclass(frozen=True)
class Row:
    """The layout of samples ids [B, T] in one row of M tokens.

    order: [M], index of each token of the row in ids[:, :-1].flatten().
    positions: [1, M], position of each token of the row in its sample.
    places: [B, T - 1], index in the row of each token of the samples.
    first: the samples whose prompts are in the row, one of each group.
    """

    order: Tensor
    positions: Tensor
    places: Tensor
    groups: Sequence[Group]
    first: Sequence[int]

    @classmethod
    def of(
        cls, ids: Tensor, lengths: Sequence[int], starts: Sequence[int] = (), prompts: Sequence[Hashable] | None = None
    ) -> "Row":
        """Pack samples [B, T] of these lengths. Samples with equal `prompts` [B], of lengths `starts` [B], share them.

        A shared prompt is in the row only once, followed by the responses to it.
        """
        width = ids.shape[1] - 1
        ends = [length - 1 for length in lengths]  # the last token predicts nothing
        members: dict[Hashable, list[int]] = {}
        for sample, prompt in enumerate(prompts or range(len(lengths))):
            members.setdefault(prompt, []).append(sample)
        order, positions, groups = [], [], []
        places, at = torch.zeros(len(lengths), width, dtype=torch.long), 0
        for samples in members.values():
            shared = max(ends[sample] for sample in samples)
            if len(samples) > 1:
                shared = min(shared, starts[samples[0]])
            spans = [(samples[0], 0, shared)]
            spans += [(sample, shared, ends[sample]) for sample in samples if ends[sample] > shared]
            for sample, begin, end in spans:
                span = torch.arange(begin, end)
                order.append(sample * width + span)
                positions.append(span)
                places[sample, begin:end] = at + span - begin
                at += end - begin
            places[samples, :shared] = places[samples[0], :shared].clone()
            groups.append((shared, [end - begin for _, begin, end in spans[1:]]))
        first = [samples[0] for samples in members.values()]
        row = torch.stack([torch.cat(order), torch.cat(positions)]).to(ids.device)
        return cls(row[0], row[1:], places.to(ids.device), groups, first)

    def read(self, values: Tensor) -> Tensor:
        """Gather the samples' values [..., B, T - 1] into the order of the row: [..., M]."""
        return values.flatten(-2)[..., self.order]

    def arguments(self, lm: Any) -> dict[str, Any]:
        """Arguments of a decoder's forward, besides the tokens [1, M]."""
        kind, device = lm.config._attn_implementation, self.order.device
        if kind in (PACKED_SDPA, PACKED_VARLEN):
            # transformers passes a 4D mask on unchanged; in a model that drops the layout, it makes all outputs NaN
            lost = torch.full((1, 1, 1, 1), torch.nan, device=device)
            layout = {"groups": self.groups} if kind == PACKED_SDPA else {"segments": Segments.of(self.groups, device)}
            return {"position_ids": self.positions, "attention_mask": lost, **layout}
        if not kind.startswith("flash"):
            return {"position_ids": self.positions}
        lengths = [length for length, _ in self.groups]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        # without these, each layer would derive them from the positions, and wait for the device
        names = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        return {"position_ids": self.positions, **names, "max_length_q": max(lengths), "max_length_k": max(lengths)}


# attention of q, k, v [R, heads, N, d] with a bool mask [1, 1, N, N], None for the causal one
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    groups: Sequence[Group] | None = None,
    share: "Share | None" = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, [R, heads, N, d] -> [R, N, heads, d], by sdpa.

    groups: the sequences in a packed row. share: for rows that ranks share. Without both, the same as sdpa.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, q, k, v, seen, **kwargs)[0]

    if share is not None:
        return share.attention(attend, module, query, key, value, sliding_window), None
    if groups is not None:
        return _one_by_one(attend, query, key, value, groups, sliding_window), None
    return attend(query, key, value, attention_mask), None


def _one_by_one(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group], window: int | None
) -> Tensor:
    """Attention of each sequence of the rows separately: query, key, value [R, heads, N, d] -> [R, N, heads, d]."""
    parts, lengths = [], [length for first, rest in groups for length in (first, *rest)]
    split = iter(zip(*(states.split(lengths, 2) for states in (query, key, value)), strict=True))
    for first, rest in groups:
        q, shared_k, shared_v = next(split)
        seen = None
        if window is not None and first > window:
            seen = _band_mask(first, first, window, q.device)
        parts.append(attend(q, shared_k, shared_v, seen))
        for length in rest:
            q, k, v = next(split)
            seen = _band_mask(length, first + length, window or first + length, q.device)
            parts.append(attend(q, torch.cat([shared_k, k], 2), torch.cat([shared_v, v], 2), seen))
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class Share:
    """This rank's n positions of rows [R, L] that the ranks of `context` share; L is padded to a multiple of the ranks.

    ids: [R, n], the tokens at these positions.
    positions: [1, n] or [R, n], each position within its sequence.
    groups: the consecutive sequences in a row; None if `mask` [R, 1, L, L], bool, says what each position attends to.
    owners: [N], the rank that scores each scored token.
    at: [M], the positions in ids.flatten() at which this rank scores one.
    """

    context: ContextGroup
    ids: Tensor
    positions: Tensor
    groups: Sequence[Group] | None
    mask: Tensor | None
    owners: Tensor
    at: Tensor

    @classmethod
    def of(cls, context: ContextGroup, ids: Tensor, predicting: Tensor, row: Row | None) -> "Share":
        """This rank's share of samples ids [B, T], with `predicting` [B, T - 1] and `row` as in CausalLM."""
        read = ids[:, :-1]
        if row is None:
            places, groups = torch.arange(read.shape[1], device=ids.device)[None], [(read.shape[1], ())]
            rows, columns = predicting.nonzero(as_tuple=True)
            return cls.cut(context, read, places, rows, columns, groups=groups)
        columns = row.places[predicting]
        rows = torch.zeros_like(columns)
        return cls.cut(context, row.read(read)[None], row.positions, rows, columns, groups=row.groups)

    @classmethod
    def cut(
        cls,
        context: ContextGroup,
        tokens: Tensor,
        positions: Tensor,
        rows: Tensor,
        columns: Tensor,
        *,
        groups: Sequence[Group] | None = None,
        mask: Tensor | None = None,
    ) -> "Share":
        """This rank's share of rows of tokens [R, L], of which those in `rows` and `columns` [N] are scored."""
        width = -(-tokens.shape[1] // context.size)
        owners = columns // width
        at = (rows * width + columns - context.place * width)[owners == context.place]
        ids, places = (context.part(values, -1) for values in (tokens, positions))
        return cls(context, ids, places, groups, mask, owners, at)

    @property
    def length(self) -> int:
        """Length of the rows without padding."""
        if self.mask is not None:
            return self.mask.shape[-1]
        return sum(first + sum(rest) for first, rest in self.groups or ())

    @property
    def local(self) -> Tensor:
        """[N] bool: the scored tokens that this rank scores."""
        return self.owners == self.context.place

    def arguments(self) -> dict[str, Any]:
        """Arguments of a decoder's forward, besides the tokens `ids`; see Row.arguments."""
        lost = torch.full((1, 1, 1, 1), torch.nan, device=self.ids.device)
        return {"position_ids": self.positions, "attention_mask": lost, "share": self}

    def whole(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gather values [M] of each rank to those of all scored tokens [N]."""
        zeros = values[0].new_zeros(self.owners.shape)
        dense = torch.stack([zeros.masked_scatter(self.local, value) for value in values])
        of_ranks = self.context.gather(dense[None], 0)  # [ranks, values, N]
        return of_ranks.take_along_dim(self.owners[None, None], 0)[0].unbind(0)

    def part_of_pool(self, kept: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of the kept tokens of all ranks, see TokenTrace.pool."""
        return kept[self.local.repeat_interleave(counts)], counts[self.local]

    def whole_pool(self, kept: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The kept tokens of all scored tokens, from this rank's."""
        [counts], owners = self.whole([counts]), self.owners
        totals = counts.new_zeros(self.context.size).index_add(0, owners, counts)
        every = self.context.gather(pad(kept, (0, int(totals.max()) - len(kept))), 0).view(self.context.size, -1)
        order = owners.argsort(stable=True)  # of the values, as the ranks one after the other have them
        of_value = order.repeat_interleave(counts[order])
        real = torch.arange(every.shape[1], device=kept.device) < totals[:, None]
        return every[real][of_value.argsort(stable=True)], counts

    def attention(
        self, attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        """Attention of this rank's query, key and value [R, heads, n, d] -> [R, n, heads, d].

        `attend` gets whole sequences of some of the heads. module: the layer. window: its sliding window.
        """
        size = self.context.size
        # repeat the heads of keys and values until the ranks can divide them equally
        times = size // math.gcd(size, key.shape[1])
        length, parts = self.length, []
        for states in (query, key, value):
            if states is not query and times > 1:
                states = states.repeat_interleave(times, 1)
            parts.append(self.context.exchange(states, 1, 2)[:, :, :length])
        query, key, value = parts
        with _query_groups(module, query.shape[1] // key.shape[1]):
            if self.groups is None:
                output = attend(query, key, value, self.mask)
            else:
                output = _one_by_one(attend, query, key, value, self.groups, window)
        padding = self.ids.shape[1] * size - length
        return self.context.exchange(pad(output, (0, 0, 0, 0, 0, padding)), 1, 2)


@contextmanager
def _query_groups(module: nn.Module, count: int) -> Iterator[None]:
    """Within this context, the layer has `count` query heads per key head, as on a rank with some of the heads."""
    if vars(module).get("num_key_value_groups", count) == count:
        yield
        return
    before, module.num_key_value_groups = module.num_key_value_groups, count  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before


def shared_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    share: Share | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As packed_sdpa, by the eager attention in the model's source file, which always takes a mask."""
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    if share is None:
        result: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, **kwargs)
        return result

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        seen = _band_mask(q.shape[2], q.shape[2], q.shape[2], q.device) if seen is None else seen
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min)
        output: Tensor = eager(module, q, k, v, mask, **kwargs)[0]
        return output

    return share.attention(attend, module, query, key, value, kwargs.get("sliding_window")), None


def _band_mask(rows: int, length: int, window: int, device: torch.device) -> Tensor:
    """Mask [1, 1, rows, length] bool of the last `rows` of `length` tokens: each sees the `window` tokens up to it."""
    ones, before = torch.ones(1, 1, rows, length, dtype=torch.bool, device=device), length - rows
    return ones.tril(before) & ones.triu(before + 1 - window)


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, sdpa_mask)
AttentionInterface.register(PACKED_VARLEN, packed_varlen)
AttentionMaskInterface.register(PACKED_VARLEN, sdpa_mask)
AttentionInterface.register(SHARED_EAGER, shared_eager)
AttentionMaskInterface.register(SHARED_EAGER, eager_mask)
