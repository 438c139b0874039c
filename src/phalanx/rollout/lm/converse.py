"""Decoding of conversations with the trained module, with one KV cache for all of their turns.

The k-th uniform number of a sample decides the k-th token that the model draws in it, regardless of the turn. Answers
join the batch at decoding steps that are fixed in advance, so the drawn tokens do not depend on how long a tool takes.
"""

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from phalanx.functional.tokens import left_padded
from phalanx.models.lm.model import CACHE
from phalanx.rollout.lm.decode import SHRINK, Decoding, Prefill, check_finite, draw

WASTE = 1.5  # empty columns are removed once the cache has this many columns per token of the longest conversation


@dataclass
class Spoken:
    """The tokens of a sample after its prompt; `sampled` marks those that the model drew, which `drawn` counts.

    `room`: the maximum number of tokens. `begin`: where the last turn begins. `cut`: the next token or answer did not
    fit. `log_probs`: of the drawn tokens, if the engine computes them.
    """

    room: int
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    begin: int = 0
    drawn: int = 0
    cut: bool = False
    log_probs: list[float] = field(default_factory=list)

    @property
    def turn(self) -> list[int]:
        """The tokens of the last turn."""
        return self.tokens[self.begin :]

    def say(self, token: int) -> None:
        """Append a token that the model has drawn."""
        self.tokens.append(token)
        self.sampled.append(True)
        self.drawn += 1

    def hear(self, answer: list[int]) -> bool:
        """Append an answer, after which the next turn begins; False if it does not fit with at least one more token."""
        self.cut = len(self.tokens) + len(answer) >= self.room
        if not self.cut:
            self.tokens += answer
            self.sampled += [False] * len(answer)
            self.begin = len(self.tokens)
        return not self.cut


class Partner(Protocol):
    """The other side of the conversations: an environment or tools."""

    def hear(self, sample: int, turn: list[int]) -> Future[Any]:
        """Start answering a turn, which ends with an end token; `answer` takes the result of the future."""

    def answer(self, sample: int, heard: Any) -> list[int] | None:
        """The tokens of the answer, up to the model's next turn; None if the conversation is over."""


@torch.no_grad()
def converse(
    forward: Callable[..., Any],
    config: Any,
    prompts: list[list[int]],
    rows: list[int],
    uniform: Tensor,
    decoding: Decoding,
    room: list[int],
    partner: Partner,
    join: int,
    prefill: Prefill | None = None,
) -> list[Spoken]:
    """Hold a conversation for each of `rows`, which are indices into `prompts`, with uniform numbers [B, limit].

    `room` [B]: the maximum number of tokens after each prompt, at least one. `join`: answers join at every `join`-th
    step, or with 0 as they arrive; and whenever no sample is drawing. `forward` and `config` are the language model's;
    `prefill` reads the prompts of a model with images. Raises JobError if logits are not finite.
    """
    device = uniform.device
    batch = _Batch(forward, config, device, decoding.pad)
    logits = batch.begin(prompts, rows, prefill)
    spoken = [Spoken(most) for most in room]
    speaking = list(range(len(rows)))  # samples that draw a token from these logits
    alive = list(range(len(rows)))  # the sample in each row of the batch
    heard: dict[int, Future[Any]] = {}  # by samples that wait for an answer
    ends, step = set(decoding.ends), 0
    finite = torch.ones((), dtype=torch.bool, device=device)
    while True:
        feeds: dict[int, list[int]] = {}  # tokens of each sample that the model has not read yet
        if speaking:
            places = {sample: place for place, sample in enumerate(alive)}
            last = logits[torch.tensor([places[sample] for sample in speaking], device=device)]
            finite &= last.amax(-1).isfinite().all()
            numbers = torch.tensor([spoken[sample].drawn for sample in speaking], device=device)
            tokens = draw(last.float(), uniform[torch.tensor(speaking, device=device), numbers], decoding).tolist()
            for sample, token in zip(speaking, tokens, strict=True):
                spoken[sample].say(token)
                if token in ends:
                    heard[sample] = partner.hear(sample, spoken[sample].turn)
                elif len(spoken[sample].tokens) == room[sample]:
                    spoken[sample].cut = True
                else:
                    feeds[sample] = [token]
        step += 1
        for sample in joining(heard, step, join, alone=not feeds):
            answer = partner.answer(sample, heard.pop(sample).result())
            if answer is not None and spoken[sample].hear(answer):
                feeds[sample] = [*spoken[sample].tokens[-len(answer) - 1 :]]
        if not feeds:
            if heard:
                speaking = []
                continue
            break
        going = [place for place, sample in enumerate(alive) if sample in feeds or sample in heard]
        if len(going) < SHRINK * len(alive):
            batch.keep(going)
            alive = [alive[place] for place in going]
        speaking = [sample for sample in alive if sample in feeds]
        logits = batch.read([feeds.get(sample, []) for sample in alive])
    check_finite(finite)
    return spoken


def joining(heard: dict[int, Future[Any]], step: int, join: int, *, alone: bool) -> list[int]:
    """The samples whose answers join now, whether they have arrived or not. `alone`: no other sample is drawing."""
    if not heard:
        return []
    if join > 0:
        return sorted(heard) if alone or step % join == 0 else []
    if alone:
        wait(heard.values(), return_when=FIRST_COMPLETED)
    return sorted(sample for sample, future in heard.items() if future.done())


class _Batch:
    """The tokens that the model has read: each sample is a row of the KV cache, and some of its columns are empty."""

    def __init__(self, forward: Callable[..., Any], config: Any, device: torch.device, pad: int) -> None:
        self._forward, self._device, self._pad = forward, device, pad
        self._cache = DynamicCache(config=config)
        self._real = torch.zeros(0)  # [B, columns]: 1 where a column holds a token of the sample
        # [B]: position minus index of the tokens after the prompt: an image may advance positions by less than its
        # number of tokens
        self._shift = torch.zeros(0)

    def begin(self, prompts: list[list[int]], rows: list[int], prefill: Prefill | None) -> Tensor:
        """Read each prompt once for all of its samples; returns the logits [B, V] of the first tokens."""
        self._real = torch.zeros(len(prompts), 0, dtype=torch.long, device=self._device)
        self._shift = torch.zeros(len(prompts), dtype=torch.long, device=self._device)
        logits = self.read(prompts, prefill)
        at = torch.tensor(rows, device=self._device)
        self._cache.reorder_cache(at)
        self._real, self._shift = self._real[at], self._shift[at]
        return logits[at]

    def read(self, feeds: list[list[int]], prefill: Prefill | None = None) -> Tensor:
        """Read new tokens of each sample; returns the logits [B, V] after them, meaningless without new tokens."""
        ids, new = left_padded(feeds, self._pad)
        ids, new = ids.to(self._device), new.to(self._device)
        before = self._real.sum(1, keepdim=True) + self._shift[:, None]
        given: dict[str, Any] = {"position_ids": (before + new.cumsum(1) - 1).clamp(min=0)}
        if prefill is not None:
            given, following = prefill(ids, new)
            self._shift = following - new.sum(1)
        self._real = torch.cat([self._real, new], 1)
        out = self._forward(
            input_ids=ids, attention_mask=self._real, **given, **{CACHE: self._cache}, use_cache=True, logits_to_keep=1
        )
        longest = int(self._real.sum(1).max()) if new.shape[1] > 1 else self._real.shape[1]
        if self._real.shape[1] > WASTE * longest:
            self._compact(longest)
        logits: Tensor = out.logits[:, -1]
        return logits

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows."""
        at = torch.tensor(rows, device=self._device)
        self._cache.reorder_cache(at)
        self._real, self._shift = self._real[at], self._shift[at]

    def _compact(self, longest: int) -> None:
        """Move each sample's tokens to the last columns, and drop the columns that are then empty in all rows."""
        # a stable sort keeps the tokens of a sample in order
        order = self._real.sort(dim=1, stable=True).indices[:, -longest:]
        for layer in self._cache.layers:
            if not layer.is_initialized:  # a layer that shares the keys and values of another one
                continue
            for name in ("keys", "values"):
                states = vars(layer)[name]
                index = order[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
                setattr(layer, name, states.gather(2, index))
        self._real = self._real.gather(1, order)
