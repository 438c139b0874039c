"""A sampling session in the trained modules of an autoregressive model, with one KV cache for all samples and turns.

Each sample is a row of a batch, whose keys and values are in buffers that are allocated once, at the first step. The
row that an ended sample leaves goes to the next request; a prompt is read once for all of its samples. On CUDA a step
without answers to read is one graph (phalanx.rollout.lm.step_graph).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from phalanx.functional.tokens import left_padded
from phalanx.models.lm.kv_rows import CACHE, Columns, KVRows, States, states_of
from phalanx.rollout.lm.decode import Decoding, draw, drawn_log_prob
from phalanx.rollout.lm.session import Request
from phalanx.rollout.lm.step_graph import StepGraphs
from phalanx.types import JobError

# takes ids and lengths of left-padded prompts, and their images; returns arguments of the pass, and next positions
Prefill = Callable[[Tensor, list[int], list[Any]], tuple[dict[str, Any], list[int]]]

# if a smaller fraction of the rows is in use and none waits for one, the others are dropped
SHRINK = 0.75
GRAPH_SHRINK = 0.5  # with graphs, since each number of rows needs one


@dataclass(eq=False)
class _Row:
    """A row of the batch: its request, and how many of the sample's tokens the model has read.

    ahead: by how much the position of a token exceeds its number; an image may advance positions by less than its
    number of tokens.
    """

    request: Request
    read: int
    ahead: int

    @property
    def draws(self) -> bool:
        """Whether the sample draws a token in the next step."""
        return not self.request.over

    @property
    def free(self) -> bool:
        """Whether the sample is no longer needed."""
        return self.request.over and not self.request.keep


@dataclass(eq=False)
class Read:
    """A prompt that was read: its keys and values, logits [V] after it, and see _Row."""

    states: States
    logits: Tensor
    read: int
    ahead: int


class PolicySession:
    """See phalanx.rollout.lm.session.Session. `forward` and `config` are the language model's.

    rows: samples drawn at once; further ones wait until one ends. prefill: reads the prompts of a model with images.
    scores: give the log-probabilities of drawn tokens. masks: see CausalLM. eager: do without CUDA graphs.
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
        masks: bool = True,
        eager: bool = False,
    ) -> None:
        self._forward, self._config, self._device = forward, config, device
        self._most, self._prefill, self._scores = rows, prefill, scores
        self._refills = masks and KVRows.serves(config)  # whether rows begin and pause at any time
        graphs = self._refills and device.type == "cuda" and not eager
        self._graphs = StepGraphs(self._step, device, forward) if graphs else None
        self.close_rows()

    def close_rows(self) -> None:
        """Forget all samples."""
        self._queue: list[tuple[int, Request]] = []  # each with the number of its prompt
        self._numbers: dict[Any, int] = {}  # of prompts: samples of one that have the same tokens so far share it
        self._rows: list[_Row] = []
        self._prompts: dict[int, Read] = {}
        self._kept: Any = None  # KVRows or Columns
        self._decoding: Decoding
        self._finite = torch.ones((), dtype=torch.bool, device=self._device)
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    def add(self, request: Request) -> None:
        """See Session. A sample whose row is kept goes on in it, otherwise it waits for one."""
        if not any(row.request is request for row in self._rows):
            key = tuple(request.rest(0)), id(request.look)
            self._queue.append((self._numbers.setdefault(key, len(self._numbers)), request))

    @torch.no_grad()
    def step(self) -> list[Request]:
        """See Session: one token of each sample."""
        self._shrink()
        requests: list[Request | None] = []
        for row in self._rows:
            requests.append(row.request if row.draws else None)
        parts = [self._read(requests)] if any(requests) else []
        requests = requests if parts else []
        new = self._admit()
        if new:
            begun, prompts = zip(*new, strict=True)
            [numbers] = self._moved(self._uniform(begun))
            parts.append(self._drawn(torch.stack([prompt.logits for prompt in prompts]), numbers))
            requests += begun
        if not parts:  # all that have a row wait for answers, of threads that should run meanwhile
            time.sleep(0.001)
            return []
        # the only wait for the device in a step
        tokens, scores = torch.cat(parts, 1).tolist()
        over = []
        for request, token, score in zip(requests, tokens, scores, strict=True):
            if request is not None and request.say([int(token)], [score] if self._scores else ()):
                over.append(request)
        return over

    def close(self) -> None:
        """See Session."""
        finite = self._finite
        self.close_rows()
        if not finite:
            raise JobError(
                "model.path: the model's logits contain NaN or infinity during decoding, because activations overflow; "
                "try the dtype float32 or, if earlier steps had finite logits, a lower learning rate"
            )

    # -- passes -------------------------------------------------------------------------------------------------------

    def _read(self, requests: Sequence[Request | None]) -> Tensor:
        """Read what the rows of `requests` have and the model has not; returns the next tokens, see `_drawn`."""
        feeds: list[list[int]] = []
        for row, request in zip(self._rows, requests, strict=True):
            feeds.append([] if request is None else request.rest(row.read))
        ids, mask = left_padded(feeds, self._decoding.pad)
        read = torch.tensor([[row.read, row.ahead] for row in self._rows])
        columns = torch.where(mask > 0, read[:, :1] + mask.cumsum(1) - 1, -1)
        inputs = torch.stack([ids, columns, (columns + read[:, 1:]).clamp(min=0)])
        numbers = self._uniform(requests)
        for row, feed in zip(self._rows, feeds, strict=True):
            row.read += len(feed)
        width = max(row.read for row in self._rows)
        if self._graphs is not None and ids.shape[1] == 1:
            return self._graphs(inputs, numbers, width, self._kept.length)
        return self._step(width, *self._moved(inputs, numbers))

    def _step(self, width: int, inputs: Tensor, numbers: Tensor) -> Tensor:
        """Read tokens and draw the next ones, see `_drawn`; without waiting for the device, and with equal shapes in
        the same memory, so that a graph can replay it. inputs: tokens, columns and positions [3, n, Q].
        """
        given = self._kept.arguments(inputs[1], width)
        out = self._forward(input_ids=inputs[0], position_ids=inputs[2], **given, use_cache=True, logits_to_keep=1)
        return self._drawn(out.logits[:, -1], numbers)

    def _drawn(self, logits: Tensor, numbers: Tensor) -> Tensor:
        """The tokens, and their log-probabilities if they are asked for, [2, n] float64, of logits [n, V]."""
        logits = logits.float()
        self._finite &= logits.amax(-1).isfinite().all()  # seen at the end: each look would wait for the device
        tokens = draw(logits, numbers, self._decoding)
        scores = drawn_log_prob(logits, tokens, self._decoding) if self._scores else numbers
        return torch.stack([tokens.double(), scores.double()])

    def _uniform(self, requests: Sequence[Request | None]) -> Tensor:
        """Their random numbers [n]."""
        return torch.tensor([0.0 if request is None else request.number for request in requests])

    def _prefilled(self, requests: list[Request]) -> tuple[DynamicCache, Tensor, list[Read]]:
        """Read what these samples have; returns a cache of left-padded rows, its mask [P, L], and their parts of it."""
        tokens, cache = [request.rest(0) for request in requests], DynamicCache(config=self._config)
        ids, mask = left_padded(tokens, requests[0].decoding.pad)
        ids, mask = self._moved(ids, mask)
        first: dict[str, Any] = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        lengths = following = list(map(len, tokens))
        if self._prefill is not None:
            first, following = self._prefill(ids, lengths, [request.look for request in requests])
        out = self._forward(
            input_ids=ids, attention_mask=mask, **first, **{CACHE: cache}, use_cache=True, logits_to_keep=1
        )
        prompts = []
        for i, (length, position) in enumerate(zip(lengths, following, strict=True)):
            states = states_of(cache, i, length) if self._refills else []
            prompts.append(Read(states, out.logits[i, -1], length, position - length))
        return cache, mask, prompts

    def _moved(self, *given: Tensor) -> list[Tensor]:
        """Tensors of the host on the device, for which the host does not wait."""
        return [tensor.to(self._device, non_blocking=True) for tensor in given]

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _admit(self) -> list[tuple[Request, Read]]:
        """Give rows to waiting samples; returns them with their prompts."""
        if not self._queue or (self._rows and not self._refills):
            return []
        if not self._rows:  # allocate rows for the samples that wait, unless there are enough
            self._decoding, least = self._queue[0][1].decoding, min(self._most, len(self._queue))
            if self._refills and (self._kept is None or self._kept.rows < least):
                self._kept = KVRows(self._config, least, max(self._room(request) for _, request in self._queue))
        count = self._kept.rows if self._refills else self._most
        places = [i for i, row in enumerate(self._rows) if row.free] + list(range(len(self._rows), count))
        new, self._queue = self._queue[: len(places)], self._queue[len(places) :]
        rows: dict[int, list[int]] = {}  # by prompt
        for place, (key, _) in zip(places, new, strict=False):
            rows.setdefault(key, []).append(place)
        self._read_prompts(new, [key for key in rows if key not in self._prompts])
        result = []
        for place, (key, request) in zip(places, new, strict=False):
            prompt = self._prompts[key]
            self._rows[place : place + 1] = [_Row(request, prompt.read, prompt.ahead)]
            result.append((request, prompt))
        if self._refills:
            for key, places in rows.items():
                self._kept.fill(places, self._prompts[key].states)
        waiting = {key for key, _ in self._queue}
        self._prompts = {key: prompt for key, prompt in self._prompts.items() if key in waiting and self._refills}
        return result

    def _room(self, request: Request) -> int:
        """The number of tokens that a sample has at most."""
        return len(request.prompt) + (request.room if request.keep else len(request.tokens) + request.left)

    def _read_prompts(self, new: list[tuple[int, Request]], unread: list[int]) -> None:
        """Read the prompts that `new` samples need and that are `unread`."""
        longest = max((self._room(request) for _, request in new), default=0)
        if self._refills and longest > self._kept.length:
            self._kept.lengthen(longest)
            self._forget_graphs()
        if not unread:
            return
        first = dict(reversed(new))
        cache, mask, prompts = self._prefilled([first[key] for key in unread])
        waiting = {key for key, _ in self._queue}
        for key, prompt in zip(unread, prompts, strict=True):
            self._prompts[key] = prompt
            if key in waiting:  # its part alone
                prompt.states = [tuple(map(Tensor.clone, states)) for states in prompt.states]
        if not self._refills:
            self._kept = Columns(cache, mask, [unread.index(key) for key, _ in new])

    def _shrink(self) -> None:
        """Drop rows without a sample if many are so and no sample waits for one."""
        used = [i for i, row in enumerate(self._rows) if not row.free]
        least = SHRINK if self._graphs is None else GRAPH_SHRINK
        if not used:
            self._rows = []
        elif len(used) < least * len(self._rows) and not (self._queue and self._refills):
            width = max(self._rows[i].read for i in used)
            self._rows = [self._rows[i] for i in self._kept.select(used, width)]
