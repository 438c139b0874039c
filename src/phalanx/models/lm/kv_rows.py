"""Keys and values of samples that are decoded together.

In KVRows each sample has a row of buffers that are allocated once, and its k-th token is in column k of them, so that
samples begin, wait and end independently: a step writes each row's new tokens at their own columns, and a mask hides
the columns after them. Layers that keep something else than all keys and values, and classes that take no finished
mask, decode in Columns: their rows begin together, left-padded, and share the columns of transformers' own cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from mmap import mmap
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

# the keyword for the cache in a language model's forward, renamed in transformers 5.24
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
States = list[tuple[Tensor, ...]]  # keys and values [H, L, D] of a prompt by layer; () if a layer shares another one's


@dataclass(eq=False)
class _Step:
    """Shared by the layers: their sizes, the columns [n, 1, Q] that the step writes, and the number that it sees. Not
    KVRows itself: a cycle would keep the buffers for the collector.
    """

    rows: int
    length: int
    columns: Tensor
    width: int = 0
    _places: dict[int, Tensor] = field(default_factory=dict)

    def sees(self, columns: Tensor, width: int) -> None:
        """Begin a step."""
        self.columns, self.width, self._places = columns, width, {}

    def places(self, heads: int) -> Tensor:
        """Where the step writes [n x heads x Q], of the columns of all rows and heads one after another."""
        if heads not in self._places:
            first = torch.arange(len(self.columns) * heads, device=self.columns.device) * (self.length + 1)
            self._places[heads] = (first.view(-1, heads, 1) + self.columns).flatten()
        return self._places[heads]


class _Layer(DynamicLayer):
    """The buffers [rows, H, length + 1, D] of a layer; the last column takes what belongs to no sample. The columns of
    a head are adjacent, because attention reads them one after another.
    """

    _layer_type = None  # transformers registers subclasses by it

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self.step, self.buffers = step, list[Tensor]()

    def allocate(self, *states: Tensor) -> list[Tensor]:
        """The buffers, made at the first call for keys and values [..., H, *, D] like these."""
        if not self.buffers:
            for one in states:
                shape = self.step.rows, one.shape[-3], self.step.length + 1, one.shape[-1]
                self.buffers.append(_zeros(shape, one.dtype, one.device))
        return self.buffers

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [n, H, Q, D] of the step; returns those of the visible columns [n, H, width, D]."""
        step, shown = self.step, []
        for buffer, states in zip(self.allocate(key_states, value_states), (key_states, value_states), strict=True):
            buffer.flatten(0, 2).index_copy_(0, step.places(states.shape[1]), states.flatten(0, 2))
            shown.append(buffer[: len(states), :, : step.width])
        return shown[0], shown[1]

    def get_seq_length(self) -> int:
        """The number of visible columns."""
        return self.step.width


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, since attention multiplies what is masked by 0, which NaN would survive."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # pages that nobody has written take no memory; torch.zeros writes all of them
    return torch.frombuffer(mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


class KVRows:
    """Up to `rows` samples of up to `length` tokens."""

    def __init__(self, config: Any, rows: int, length: int) -> None:
        self._step = _Step(rows, length, torch.zeros(0, dtype=torch.long))
        self.cache = DynamicCache(config=config)
        self.cache.layers = [_Layer(self._step) for _ in self.cache.layers]
        if self.cache.layer_class_to_replicate is not None:
            self.cache.layer_class_to_replicate = partial(_Layer, self._step)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self._step.rows

    @property
    def length(self) -> int:
        """The number of columns."""
        return self._step.length

    @staticmethod
    def serves(config: Any) -> bool:
        """Whether all layers keep all keys and values."""
        cache = DynamicCache(config=config)
        kinds = {type(layer) for layer in cache.layers} or {cache.layer_class_to_replicate}
        return kinds == {DynamicLayer}

    def fill(self, rows: Sequence[int], states: States) -> None:
        """Let these rows begin with a prompt; without `states`, with nothing."""
        while len(self.cache.layers) < len(states):
            self.cache.layers.append(_Layer(self._step))
        for layer, given in zip(self.cache.layers, states, strict=bool(states)):
            for buffer, one in zip(layer.allocate(*given), given, strict=True):
                for row in rows:
                    buffer[row, :, : one.shape[1]] = one

    def lengthen(self, length: int) -> None:
        """Copy all rows into longer ones."""
        more, self._step.length = length - self.length, length
        for layer in self.cache.layers:
            layer.buffers = [pad(buffer, (0, 0, 0, more)) for buffer in layer.buffers]

    def select(self, used: Sequence[int], width: int) -> list[int]:
        """Keep only these rows, as the first ones; returns which row each of them was. width: of the longest."""
        order = list(range(len(used)))
        holes = sorted(set(order).difference(used))
        for hole, row in zip(holes, [i for i in used if i >= len(used)], strict=True):
            order[hole] = row
            for layer in self.cache.layers:
                for buffer in layer.buffers:
                    buffer[hole, :, :width] = buffer[row, :, :width]
        return order

    def arguments(self, columns: Tensor, width: int, visible: Tensor | None = None) -> dict[str, Any]:
        """Arguments of a forward pass over tokens [n, Q] that go to these columns, -1 for none, and see the columns
        before `width`: those up to their own, or the `visible` ones, [n, Q, width] bool.
        """
        self._step.sees(torch.where(columns < 0, self.length, columns)[:, None], width)
        if visible is None:
            visible = torch.arange(width, device=columns.device) <= columns.clamp(min=0)[..., None]
        return {"attention_mask": visible[:, None], CACHE: self.cache}


def holds_rows(cache: Any) -> bool:
    """Whether it is the cache of a KVRows."""
    return cache is not None and any(isinstance(layer, _Layer) for layer in cache.layers)


class Columns:
    """Samples that begin together as rows of prompts that were read into `cache` with a mask [P, L], left-padded."""

    def __init__(self, cache: DynamicCache, mask: Tensor, rows: Sequence[int]) -> None:
        self.cache, self._real = cache, mask
        self.select(rows, mask.shape[1])

    def select(self, used: Sequence[int], width: int) -> Sequence[int]:
        """See KVRows."""
        at = torch.tensor(used, device=self._real.device)
        self.cache.reorder_cache(at)
        self._real = self._real[at]
        return used

    def arguments(self, columns: Tensor, width: int) -> dict[str, Any]:
        """See KVRows; the columns are the next ones."""
        self._real = torch.cat([self._real, (columns >= 0).to(self._real.dtype)], 1)
        return {"attention_mask": self._real, CACHE: self.cache}


def states_of(cache: DynamicCache, row: int, length: int) -> States:
    """The keys and values of the last `length` columns of a row of a cache that is left-padded."""
    states: States = []
    for layer in cache.layers:
        if layer.is_initialized:
            first = layer.keys.shape[2] - length
            states.append((layer.keys[row, :, first:], layer.values[row, :, first:]))
        else:
            states.append(())
    return states
