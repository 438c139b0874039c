"""Sequences of different lengths side by side in one row, without padding, each of which attends only to itself, or to
a prompt before it that several share; and rows whose positions are spread over ranks.

With flash-attention packing is its kernel for variable lengths; with eager and FlexAttention transformers makes the
mask from positions that begin anew. With torch's own kernels each sequence is a separate call: the mask of a whole row
would take the square of its length, in memory and arithmetic.

Ranks that share rows exchange positions for heads around each attention, which then sees whole rows of some heads.
"""

import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from phalanx.distributed.context_parallel import KEY, ContextGroup

PACKED_SDPA = "phalanx_packed_sdpa"
SHARED = {"sdpa": "phalanx_shared_sdpa", "eager": "phalanx_shared_eager"}  # by model.attn_implementation
_ATTENDS = ("full_attention", "sliding_attention")
_OF_LENGTH = ("dynamic", "longrope")  # positions whose angles depend on the longest one


def implementation(name: str) -> str:
    """The attention that packs where `name`, that of model.attn_implementation, is asked for."""
    return PACKED_SDPA if name == "sdpa" else name


def check(lm: Any, given: str = "model.use_remove_padding: true", advice: str = "set it to false") -> None:
    """Raise ValueError for a model in which a sequence would see its neighbors all the same, or not the rest of it;
    `given` is what asks for it.
    """
    kinds = lm.config.to_dict().get("layer_types") or ()
    other = sorted({kind for kind in kinds if kind not in _ATTENDS})
    if other or lm._is_stateful:
        raise ValueError(
            f"{given} needs layers of attention, and {lm.config.model_type} has others"
            f"{f' ({other[0]})' if other else ''}; {advice}"
        )


def spread(lm: Any, context: ContextGroup, name: str) -> None:
    """Let a model's attention exchange positions for heads, where `name` is that of model.attn_implementation. Raises
    ValueError, in one line, for a model that cannot.
    """
    given = f"{KEY}: {context.size}"
    check(lm, given, "set it to 1")
    settings = lm.config.to_dict()
    heads = lm.config.num_attention_heads
    if heads % context.size:
        raise ValueError(f"{given} does not divide the model's {heads} attention heads")
    rope = settings.get("rope_parameters") or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    for kind in _OF_LENGTH:
        if kind in kinds:
            raise ValueError(
                f"{given} does not work with the positions of {lm.config.model_type} (rope_type {kind}), whose angles "
                "depend on the longest of a pass; set it to 1"
            )
    lm.set_attn_implementation(SHARED[name])


# lengths of a sequence, and of those behind it, each of which attends to it and to itself
Group = tuple[int, Sequence[int]]


@dataclass(frozen=True)
class Row:
    """The tokens that a pass reads of samples ids [B, T], M of them side by side in one row.

    `order` [M] are their places in ids[:, :-1].flatten(), `positions` [1, M] those in their samples, and `places`
    [B, T - 1] where in the row each token of the samples stands. `first` are the samples whose prompts are there.
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
        """That of samples [B, T] of these lengths, without padding. Of those whose `prompts` [B] are equal, which are
        as long as `starts` [B] says, the prompt stands once in the row, before what follows it in each of them.
        """
        width = ids.shape[1] - 1
        ends = [length - 1 for length in lengths]  # nothing follows the last token
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
        """[..., M] of the samples' values [..., B, T - 1]."""
        return values.flatten(-2)[..., self.order]

    def arguments(self, lm: Any) -> dict[str, Any]:
        """Arguments of a decoder beside the tokens [1, M]."""
        kind, device = lm.config._attn_implementation, self.order.device
        if kind == PACKED_SDPA:
            # a mask of four dims is left as it is; should a model lose `groups`, it shows at once
            lost = torch.full((1, 1, 1, 1), torch.nan, device=device)
            return {"position_ids": self.positions, "attention_mask": lost, "groups": self.groups}
        if not kind.startswith("flash"):
            return {"position_ids": self.positions}
        lengths = [length for length, _ in self.groups]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        # without these each layer would look for them in the positions, and wait for the device
        names = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        return {"position_ids": self.positions, **names, "max_length_q": max(lengths), "max_length_k": max(lengths)}


# attention of q, k, v [R, heads, N, d] and the positions [1, 1, N, N] bool that each sees, None for those up to it
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def packed_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    groups: Sequence[Group] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, [1, heads, N, d] -> [1, N, heads, d]; without `groups`, that of sdpa."""
    if groups is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, q, k, v, seen, **kwargs)[0]

    return _one_by_one(attend, query, key, value, groups, sliding_window), None


def _one_by_one(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group], window: int | None
) -> Tensor:
    """[R, N, heads, d] of query, key and value [R, heads, N, d], each of the sequences of a row by itself."""
    parts, lengths = [], [length for first, rest in groups for length in (first, *rest)]
    split = iter(zip(*(states.split(lengths, 2) for states in (query, key, value)), strict=True))
    for first, rest in groups:
        q, shared_k, shared_v = next(split)
        seen = None
        if window is not None and first > window:
            seen = _band(first, first, window, q.device)
        parts.append(attend(q, shared_k, shared_v, seen))
        for length in rest:
            q, k, v = next(split)
            seen = _band(length, first + length, window or first + length, q.device)
            parts.append(attend(q, torch.cat([shared_k, k], 2), torch.cat([shared_v, v], 2), seen))
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class Share:
    """This rank's positions of rows [R, L] that the ranks of `context` share, L rounded up to a multiple of them: the
    tokens `ids` [R, n] there, those of them that predict, `predicting` [R, n], and the N tokens that follow these.

    Every rank knows `everywhere` [R, L], the positions that predict. `sequences` are the lengths of the sequences in a
    row, one behind the other, and `positions` [1, n] the place of each of this rank's in its sequence.
    """

    context: ContextGroup
    ids: Tensor
    predicting: Tensor
    tokens: Tensor
    everywhere: Tensor
    sequences: Sequence[int]
    positions: Tensor

    @classmethod
    def of(cls, context: ContextGroup, ids: Tensor, predicting: Tensor, row: Row | None) -> "Share":
        """That of samples ids [B, T], of which the positions `predicting` [B, T - 1] predict; see CausalLM."""
        read, follows = ids[:, :-1], ids[:, 1:]
        sequences, places = [read.shape[1]], torch.arange(read.shape[1], device=ids.device)[None]
        if row is not None:
            sequences, places = [length for length, _ in row.groups], row.positions
            read, follows, predicting = (row.read(values)[None] for values in (read, follows, predicting))
        behind = -read.shape[1] % context.size
        width = (read.shape[1] + behind) // context.size
        part = slice(context.place * width, (context.place + 1) * width)
        read, follows, places, everywhere = (pad(values, (0, behind)) for values in (read, follows, places, predicting))
        local = everywhere[:, part]
        return cls(context, read[:, part], local, follows[:, part][local], everywhere, sequences, places[:, part])

    def arguments(self) -> dict[str, Any]:
        """Arguments of a decoder beside the tokens `ids`; see Row.arguments."""
        lost = torch.full((1, 1, 1, 1), torch.nan, device=self.ids.device)
        return {"position_ids": self.positions, "attention_mask": lost, "share": self}

    def whole(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All ranks' values, in the order of the positions that predict, from this rank's [N] each."""
        zeros = values[0].new_zeros(self.predicting.shape)
        dense = torch.stack([zeros.masked_scatter(self.predicting, value) for value in values])
        return self.context.gather(dense, -1)[:, self.everywhere].unbind(0)

    def attention(
        self, attend: Attend, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        """[R, n, heads, d] of query, key and value [R, heads, n, d], by `attend` of whole sequences and some of the
        heads of the layer `module`; see packed_sdpa for `window`.
        """
        size, heads = self.context.size, query.shape[1]
        if heads % size:
            raise ValueError(f"{KEY}: {size} does not divide the {heads} attention heads of a layer")
        # as many heads of keys and values as the ranks can be dealt equally
        times = size // math.gcd(size, key.shape[1])
        length, parts = sum(self.sequences), []
        for states in (query, key, value):
            if states is not query and times > 1:
                states = states.repeat_interleave(times, 1)
            parts.append(self.context.exchange(states, 1, 2)[:, :, :length])
        query, key, value = parts
        with _groups(module, query.shape[1] // key.shape[1]):
            output = _one_by_one(attend, query, key, value, [(length, ()) for length in self.sequences], window)
        behind = self.everywhere.shape[1] - length
        return self.context.exchange(pad(output, (0, 0, 0, 0, 0, behind)), 1, 2)


@contextmanager
def _groups(module: nn.Module, count: int) -> Iterator[None]:
    """A layer has `count` query heads for each head of keys: on a rank that has some of the heads."""
    if vars(module).get("num_key_value_groups", count) == count:
        yield
        return
    before, module.num_key_value_groups = module.num_key_value_groups, count  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = before


def shared_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    share: Share | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As packed_sdpa, of rows that ranks share; without `share`, that of sdpa."""
    if share is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return sdpa_attention_forward(module, q, k, v, seen, **kwargs)[0]

    return share.attention(attend, module, query, key, value, sliding_window), None


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
    """The same with the eager attention of the model's module, which gets a mask in any case."""
    eager = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    if share is None:
        result: tuple[Tensor, Tensor | None] = eager(module, query, key, value, attention_mask, **kwargs)
        return result

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        seen = _band(q.shape[2], q.shape[2], q.shape[2], q.device) if seen is None else seen
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, torch.finfo(q.dtype).min)
        output: Tensor = eager(module, q, k, v, mask, **kwargs)[0]
        return output

    return share.attention(attend, module, query, key, value, kwargs.get("sliding_window")), None


def _band(rows: int, length: int, window: int, device: torch.device) -> Tensor:
    """[1, 1, rows, length] bool, of the last `rows` of `length` tokens: each token, and window - 1 before it."""
    ones, before = torch.ones(1, 1, rows, length, dtype=torch.bool, device=device), length - rows
    return ones.tril(before) & ones.triu(before + 1 - window)


for _name, _attention, _mask in (
    (PACKED_SDPA, packed_sdpa, sdpa_mask),
    (SHARED["sdpa"], shared_sdpa, sdpa_mask),
    (SHARED["eager"], shared_eager, eager_mask),
):
    AttentionInterface.register(_name, _attention)
    AttentionMaskInterface.register(_name, _mask)
