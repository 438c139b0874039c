"""A sampling session in the trained modules of an autoregressive model, with one KV cache for all samples and turns.

Each sample is a row of a batch. Rows share their columns: the newest tokens of all rows are in the last ones, so that
a step writes one column; a row's columns before its prompt, and those in which it waits for an answer, are masked.
The row that an ended sample leaves goes to the next request; a prompt is read once for all of its samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from phalanx.functional.tokens import left_padded
from phalanx.models.lm.model import CACHE
from phalanx.rollout.lm.decode import check_finite, draw, drawn_log_prob
from phalanx.rollout.lm.session import Request

# takes ids and mask of left-padded prompts and their images; returns arguments of the forward pass, and next positions
Prefill = Callable[[Tensor, Tensor, list[Any]], tuple[dict[str, Any], Tensor]]

# if a smaller fraction of the rows is in use and none waits for one, the batch is copied into a smaller one
SHRINK = 0.75
GROWTH, SPARE = 1.5, 32  # buffers are allocated for this many times the columns in use and some more: few steps copy
WASTE = 1.125  # if rows begin at different steps, there are up to this many columns per token of the longest sample


class Layer(DynamicLayer):
    """Keys and values [B, H, columns, D] as the filled columns of larger buffers, into which new ones are written."""

    _layer_type = None  # transformers registers subclasses by it
    most = 0  # columns that are needed at most

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Append columns; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.hold(key_states, value_states)
            return self.keys, self.values
        width, new = self.keys.shape[2], key_states.shape[2]
        if width + new > self.buffers[0].shape[2]:
            self.hold(self.keys, self.values, new)
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, width : width + new] = states
        self._show(width + new)
        return self.keys, self.values

    def hold(self, keys: Tensor, values: Tensor, new: int = 0) -> None:
        """Copy these into new buffers, with room for at least `new` columns behind them."""
        self.buffers = []
        for states in (keys, values):
            rows, heads, width, size = states.shape
            room = max(min(int(GROWTH * (width + new)) + SPARE, self.most), width + new)
            self.buffers.append(states.new_empty(rows, heads, room, size))
            self.buffers[-1][:, :, :width] = states
        self._show(width)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep these rows."""
        if self.is_initialized:  # a layer may share the keys and values of another one
            self.hold(self.keys.index_select(0, beam_idx), self.values.index_select(0, beam_idx))

    def _show(self, width: int) -> None:
        self.keys, self.values = (buffer[:, :, :width] for buffer in self.buffers)


@dataclass(eq=False)
class _Row:
    """A row of the batch: its request, and how many of the sample's tokens the model has read."""

    request: Request
    read: int

    @property
    def draws(self) -> bool:
        """Whether the sample draws a token in the next step."""
        return not self.request.over

    @property
    def free(self) -> bool:
        """Whether the sample is no longer needed."""
        return self.request.over and not self.request.keep


@dataclass(eq=False)
class _Prompt:
    """A prompt that was read: keys and values [H, L, D] by layer, logits [V] after it and the next position."""

    states: list[tuple[Tensor, ...]]
    logits: Tensor
    position: Tensor


class PolicySession:
    """See phalanx.rollout.lm.session.Session. `forward` and `config` are the language model's.

    rows: samples drawn at once; further ones wait until one ends. prefill: reads the prompts of a model with images.
    scores: give the log-probabilities of drawn tokens.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        config: Any,
        device: torch.device,
        rows: int,
        prefill: Prefill | None = None,
        *,
        scores: bool = False,
    ) -> None:
        self._forward, self._config, self._device = forward, config, device
        self._most, self._prefill, self._scores = rows, prefill, scores
        self.close_rows()

    def close_rows(self) -> None:
        """Forget all samples."""
        self._queue: list[Request] = []
        self._columns = 0  # at most needed
        self._rows: list[_Row] = []
        self._prompts: dict[Any, _Prompt] = {}
        self._cache = DynamicCache()
        self._real = torch.zeros(0)  # [B, columns]: 1 where a column holds a token of the sample
        # [B]: the next position: an image may advance positions by less than its number of tokens
        self._position = torch.zeros(0)
        self._finite = torch.ones((), dtype=torch.bool, device=self._device)

    def add(self, request: Request) -> None:
        """See Session. A sample whose row is kept goes on in it, otherwise it waits for one."""
        if not any(row.request is request for row in self._rows):
            self._queue.append(request)
            staggered = request.keep or len(self._rows) + len(self._queue) > self._most
            columns = (len(request.prompt) + request.room) * (WASTE if staggered else 1)
            self._columns = max(self._columns, int(columns))
            self._fit(self._cache)

    @torch.no_grad()
    def step(self) -> list[Request]:
        """See Session: one token of each sample."""
        self._shrink()
        parts = []
        speaking = [i for i, row in enumerate(self._rows) if row.draws]
        if speaking:
            logits = self._read()
            if len(speaking) < len(self._rows):
                logits = logits[torch.tensor(speaking, device=self._device)]
            parts.append(([self._rows[i].request for i in speaking], logits))
        if self._queue:
            parts += self._admit()
        drawn, scores = [], []
        for requests, logits in parts:
            logits, decoding = logits.float(), requests[0].decoding
            self._finite &= logits.amax(-1).isfinite().all()  # seen at the end: each look would wait for the device
            numbers = torch.tensor([request.number for request in requests]).to(self._device)
            drawn.append(draw(logits, numbers, decoding))
            if self._scores:
                scores.append(drawn_log_prob(logits, drawn[-1], decoding))
        # the only wait for the device in a step
        tokens = torch.cat(drawn).tolist() if drawn else []
        log_probs = torch.cat(scores).tolist() if scores else []
        over = []
        for i, request in enumerate(chain.from_iterable(requests for requests, _ in parts)):
            if request.say(tokens[i : i + 1], log_probs[i : i + 1]):
                over.append(request)
        return over

    def close(self) -> None:
        """See Session."""
        finite = self._finite
        self.close_rows()
        check_finite(finite)

    # -- passes -------------------------------------------------------------------------------------------------------

    def _read(self) -> Tensor:
        """Read the tokens that each row has and the model has not; returns the logits [B, V] after them."""
        feeds = [row.request.rest(row.read) if row.draws else [] for row in self._rows]
        ids, new = left_padded(feeds, self._rows[0].request.decoding.pad)
        ids, new = ids.to(self._device), new.to(self._device)
        self._compact(ids.shape[1])
        self._real = torch.cat([self._real, new], 1)
        out = self._forward(
            input_ids=ids,
            attention_mask=self._real,
            position_ids=(self._position[:, None] + new.cumsum(1) - 1).clamp(min=0),
            **{CACHE: self._cache},
            use_cache=True,
            logits_to_keep=1,
        )
        self._position = self._position + new.sum(1)
        for row, feed in zip(self._rows, feeds, strict=True):
            row.read += len(feed)
        logits: Tensor = out.logits[:, -1]
        return logits

    def _prefilled(self, requests: list[Request], cache: DynamicCache) -> tuple[Tensor, Tensor, Tensor]:
        """Read what these samples have into an empty cache; returns logits [P, V], positions [P] and mask [P, L]."""
        ids, mask = left_padded([request.rest(0) for request in requests], requests[0].decoding.pad)
        ids, mask = ids.to(self._device), mask.to(self._device)
        first: dict[str, Any] = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        position = mask.sum(1)
        if self._prefill is not None:
            first, position = self._prefill(ids, mask, [request.look for request in requests])
        out = self._forward(
            input_ids=ids, attention_mask=mask, **first, **{CACHE: cache}, use_cache=True, logits_to_keep=1
        )
        return out.logits[:, -1], position, mask

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> list[tuple[list[Request], Tensor]]:
        """Give rows to waiting samples; returns them with the logits [b, V] of their next tokens."""
        free = [i for i, row in enumerate(self._rows) if row.free]
        count = self._most - len(self._rows) + len(free)
        if self._rows and not (free and self._refills):
            return []
        new, self._queue = self._queue[:count], self._queue[count:]
        keys = list(map(_key, new))
        first = dict(zip(reversed(keys), reversed(new), strict=True))  # one sample of each prompt
        distinct = list(dict.fromkeys(keys))
        if not self._rows:
            cache = self._cache = self._empty()
            logits, position, mask = self._prefilled([first[key] for key in distinct], cache)
            self._keep_prompts(distinct, cache, logits, position, mask)
            at = torch.tensor([distinct.index(key) for key in keys], device=self._device)
            cache.reorder_cache(at)
            self._real, self._position = mask[at], position[at]
            self._rows = [_Row(request, len(request.rest(0))) for request in new]
            return [(new, logits[at])]
        unread = [key for key in distinct if key not in self._prompts]
        if unread:
            cache = self._empty()
            logits, position, mask = self._prefilled([first[key] for key in unread], cache)
            self._keep_prompts(unread, cache, logits, position, mask, every=True)
        for i, request, key in zip(free, new, keys, strict=False):
            self._fill(i, request, self._prompts[key])
        logits = torch.stack([self._prompts[key].logits for key in keys])
        waiting = set(map(_key, self._queue))
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if key in waiting}
        return [(new, logits)]

    def _keep_prompts(
        self,
        keys: list[Any],
        cache: DynamicCache,
        logits: Tensor,
        position: Tensor,
        mask: Tensor,
        *,
        every: bool = False,
    ) -> None:
        """Keep what was read of the prompts that waiting samples share, or of `every` one."""
        waiting = set(map(_key, self._queue)) if self._refills else set()
        for i, key in enumerate(keys):
            if every or key in waiting:
                length = int(mask[i].sum())
                states = []
                for layer in cache.layers:
                    part = (i, slice(None), slice(layer.get_seq_length() - length, None))
                    states.append(tuple(s[part].clone() for s in (layer.keys, layer.values) if layer.is_initialized))
                self._prompts[key] = _Prompt(states, logits[i], position[i])

    def _fill(self, i: int, request: Request, prompt: _Prompt) -> None:
        """Give row i to a sample."""
        length, width = len(request.rest(0)), self._real.shape[1]
        if length > width:
            self._real = pad(self._real, (length - width, 0))
        self._real[i] = 0
        self._real[i, -length:] = 1
        self._position[i] = prompt.position
        for layer, states in zip(self._cache.layers, prompt.states, strict=True):
            if states and length > width:
                layer.hold(*(pad(held, (0, 0, length - width, 0)) for held in (layer.keys, layer.values)))
            for held, given in zip((layer.keys, layer.values), states, strict=False):
                held[i, :, -length:] = given
        self._rows[i] = _Row(request, length)

    def _shrink(self) -> None:
        """Drop rows without a sample if many are so and no sample waits for one."""
        used = [i for i, row in enumerate(self._rows) if not row.free]
        if not used:
            self._rows = []
        elif len(used) < SHRINK * len(self._rows) and not (self._queue and self._refills):
            at = torch.tensor(used, device=self._device)
            self._cache.reorder_cache(at)
            self._real, self._position = self._real[at], self._position[at]
            self._rows = [self._rows[i] for i in used]

    def _compact(self, new: int) -> None:
        """Drop columns that are empty in all rows before `new` ones come, if there are many or no room."""
        longest = max(row.read for row in self._rows if not row.free)
        most = min(max(GROWTH * longest, SPARE), self._columns)
        if self._real.shape[1] + new <= max(most, longest + new) or not self._refills:
            return
        # move each sample's tokens to the last columns; a stable sort keeps them in order
        order = self._real.sort(dim=1, stable=True).indices[:, -longest:]
        for layer in self._cache.layers:
            if layer.is_initialized:
                index = order[:, None, :, None]
                layer.hold(
                    *(s.gather(2, index.expand(-1, s.shape[1], -1, s.shape[3])) for s in (layer.keys, layer.values))
                )
        self._real = self._real.gather(1, order)

    @property
    def _refills(self) -> bool:
        """Whether rows can begin and pause at any time: all layers attend to all tokens."""
        return all(isinstance(layer, Layer) for layer in self._cache.layers)

    def _empty(self) -> DynamicCache:
        """A cache without tokens."""
        cache = DynamicCache(config=self._config)
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = Layer
        cache.layers = [Layer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        self._fit(cache)
        return cache

    def _fit(self, cache: DynamicCache) -> None:
        for layer in cache.layers:
            if isinstance(layer, Layer):
                layer.most = self._columns


def _key(request: Request) -> Any:
    """The same for samples of one prompt that have the same tokens so far."""
    return tuple(request.rest(0)), id(request.look)
