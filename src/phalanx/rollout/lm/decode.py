"""Decoding with the trained module and a KV cache.

Token t of a sample is drawn by inverting the cumulative distribution at a uniform number that belongs to the sample, so
the tokens depend neither on the batch nor on the rank, up to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import DynamicCache

from phalanx.functional.tokens import FAR, WHOLE, Truncation, left_padded
from phalanx.models.lm.model import CACHE
from phalanx.types import JobError

# takes ids and mask of left-padded prompts; returns arguments of the forward pass over them, and the next positions
Prefill = Callable[[Tensor, Tensor], tuple[dict[str, Any], Tensor]]

SHRINK = 0.75  # if a smaller fraction of the samples continues, copying the cache into a smaller batch pays off


@dataclass(frozen=True)
class Decoding:
    """Settings: at most `limit` tokens, up to one of `ends` and none of `never`; temperature 0 is greedy."""

    limit: int
    temperature: float
    ends: Sequence[int]
    pad: int
    truncation: Truncation = WHOLE
    never: Sequence[int] = ()


class StopTexts:
    """Detects stop `texts` in responses token by token. As in vLLM, special tokens are not part of the text."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], prompts: Sequence[list[int]]) -> None:
        """`prompts` [B]: the tokens before each response; `tokenizer` is backed by the tokenizers library."""
        self._tokenizer, self._texts = tokenizer.backend_tokenizer, texts
        self._streams = [DecodeStream(ids=prompt, skip_special_tokens=True) for prompt in prompts]
        self._tails = [""] * len(prompts)  # the last characters, in which a stop text may begin
        self._kept = max(map(len, texts)) - 1

    def complete(self, sample: int, token: int) -> bool:
        """Whether the next token of a sample completes one of the texts."""
        text = self._tails[sample] + self._next(sample, token)
        self._tails[sample] = text[max(len(text) - self._kept, 0) :]
        return any(stop in text for stop in self._texts)

    def _next(self, sample: int, token: int) -> str:
        try:
            return self._streams[sample].step(self._tokenizer, token) or ""
        except Exception as error:  # the library defines no exception type
            if not str(error).startswith("Invalid prefix"):
                raise
            # invalid bytes have broken the stream: start a new one, as vLLM does
            self._streams[sample] = DecodeStream(skip_special_tokens=True)
            return self._streams[sample].step(self._tokenizer, token) or ""


@torch.no_grad()
def decode(
    forward: Callable[..., Any],
    config: Any,
    prompts: list[list[int]],
    rows: list[int],
    uniform: Tensor,
    decoding: Decoding,
    stops: StopTexts | None = None,
    log_probs: list[list[float]] | None = None,
    prefill: Prefill | None = None,
) -> list[list[int]]:
    """Draw a response for each of `rows`, which are indices into `prompts`, with uniform numbers [B, limit].

    A response also ends with the token that completes one of `stops`. The log-probabilities of each response's tokens
    are appended to `log_probs`. `forward` and `config` are the language model's; `prefill` reads the prompts of a model
    with images. Raises JobError if logits are not finite.
    """
    device = uniform.device
    ids, mask = left_padded(prompts, decoding.pad)
    ids, mask = ids.to(device), mask.to(device)
    cache = DynamicCache(config=config)
    first: dict[str, Any] = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    position = mask.sum(1)
    if prefill is not None:
        first, position = prefill(ids, mask)
    # each prompt is read once for all of its samples
    out = forward(input_ids=ids, attention_mask=mask, **first, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    at = torch.tensor(rows, device=device)
    cache.reorder_cache(at)
    logits, mask, position = out.logits[at, -1], mask[at], position[at]
    finite = logits.amax(-1).isfinite().all()  # checked once, at the end, because each check would wait for the device
    responses: list[list[int]] = [[] for _ in rows]
    if log_probs is not None:
        log_probs += [[] for _ in rows]
    alive = torch.arange(len(rows), device=device)  # the samples in the batch; some of them may have ended
    ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
    ends = torch.tensor(decoding.ends, device=device)
    for t in range(decoding.limit):
        drawn = draw(logits.float(), uniform[alive, t], decoding)
        if log_probs is not None:
            scores = drawn_log_prob(logits.float(), drawn, decoding).tolist()
            for sample, score, over in zip(alive.tolist(), scores, ended[alive].tolist(), strict=True):
                if not over:
                    log_probs[sample].append(score)
        for sample, token, over in zip(alive.tolist(), drawn.tolist(), ended[alive].tolist(), strict=True):
            if not over:
                responses[sample].append(token)
                if stops is not None and stops.complete(sample, token):
                    ended[sample] = True
        ended[alive] |= torch.isin(drawn, ends)
        going = ~ended[alive]
        if t + 1 == decoding.limit or not going.any():
            break
        if int(going.sum()) < SHRINK * len(going):
            keep = going.nonzero().squeeze(1)
            cache.reorder_cache(keep)
            alive, mask, position, drawn = alive[keep], mask[keep], position[keep], drawn[keep]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        out = forward(
            input_ids=drawn[:, None],
            attention_mask=mask,
            position_ids=position[:, None],
            **{CACHE: cache},
            use_cache=True,
        )
        logits, position = out.logits[:, -1], position + 1
        finite &= logits.amax(-1).isfinite().all()
    check_finite(finite)
    return responses


def check_finite(finite: Tensor) -> None:
    """Raise JobError unless `finite`, a bool tensor: whether all logits of the rollout were finite."""
    if not finite:
        raise JobError(
            "model.path: the model's logits contain NaN or infinity during decoding, because activations overflow; try "
            "the dtype float32 or, if earlier steps had finite logits, a lower learning rate"
        )


def draw(logits: Tensor, uniform: Tensor, decoding: Decoding) -> Tensor:
    """Draw tokens [B] from logits [B, V]."""
    if decoding.never:
        logits = logits.index_fill(-1, torch.tensor(decoding.never, device=logits.device), FAR)
    if decoding.temperature == 0:
        return logits.argmax(-1)
    cumulative = _probabilities(logits, decoding).cumsum(-1)
    at = uniform.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, at, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


def drawn_log_prob(logits: Tensor, tokens: Tensor, decoding: Decoding) -> Tensor:
    """Log-probabilities [B] float32 of tokens [B] that were drawn from logits [B, V] at a temperature above 0."""
    p = _probabilities(logits, decoding)
    return (p.gather(1, tokens[:, None]).squeeze(1) / p.sum(-1)).log().float()


def _probabilities(logits: Tensor, decoding: Decoding) -> Tensor:
    """The probabilities [B, V] float64 of a draw, not normalized; 0 for the tokens that truncation excludes."""
    p = torch.softmax(logits / decoding.temperature, -1).double()
    return p.masked_fill(~decoding.truncation.kept(p), 0.0) if decoding.truncation.on else p
