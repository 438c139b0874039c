"""Values of language models: what was sampled, and the log-probabilities of its tokens.

Shapes: B samples of this rank, T tokens of the longest prompt with its response, A tokens of the longest response,
V the vocabulary, N tokens of all responses of a batch, sample by sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from phalanx.config.lm import LMRolloutConfig, LMValRolloutConfig
from phalanx.functional.token_budget import in_order
from phalanx.types import Replay

FAR = -1e30  # the logit of a token that cannot be drawn
ROWS = 64  # distributions that are sorted together


@dataclass(frozen=True)
class Truncation:
    """The tokens that are sampled from: those of at least `min_p` times the largest probability, of these the `top_k`
    likeliest ones (0 and -1: all), and of these the likeliest ones that have `top_p` of the probability.
    """

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, config: LMRolloutConfig | LMValRolloutConfig) -> Self:
        """That of a section of the configuration."""
        return cls(config.top_k, config.top_p, config.min_p)

    @property
    def on(self) -> bool:
        """Whether it leaves out any token."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def kept(self, p: Tensor) -> Tensor:
        """[N, V] bool: the tokens that are kept of distributions p [N, V]; of equal ones at the limit of top_k, all."""
        kept = (p > 0) & (p >= self.min_p * p.amax(-1, keepdim=True))
        if 0 < self.top_k < p.shape[-1]:
            kept &= p >= p.topk(self.top_k).values[:, -1:]
        if self.top_p < 1:
            if self.top_k > 0 or self.min_p > 0:
                p = p.masked_fill(~kept, 0.0)
                p = p / p.sum(-1, keepdim=True)
            ordered, order = p.sort(-1, descending=True)
            before = ordered.cumsum(-1) - ordered
            kept &= ~torch.zeros_like(kept).scatter(-1, order, before >= self.top_p)
        return kept


WHOLE = Truncation()


@dataclass(frozen=True)
class TokenTrace:
    """Prompts with their responses: ids [B, T], padded behind; starts [B], the prompts' lengths; lengths [B], those of
    the responses; `width`, A. `certainty` [B]: the mean self-certainty of each response, once the policy has said it.

    Where sampling is truncated, and once the policy has scored them, `counts` [B, A] int32 are the tokens that each
    token of a response was drawn from, and `kept` [B, K] int32 these tokens, one after the other, padded behind.

    A conversation is a sample, too: `ends` [B] are its tokens in all, and `sampled` [B, T] bool those that the policy
    drew, of which `lengths` is the number; the others are what it was answered, which is given, as the prompt is.
    Without these two all tokens behind the prompt are drawn.

    `looks` [B]: the images of each prompt, None for none (phalanx.models.lm.vision.Look); None: no prompt has any.

    All ranks pad to the same T and A, so that each pass over some of the samples has one shape.
    """

    ids: Tensor
    starts: Tensor
    lengths: Tensor
    width: int
    certainty: Tensor | None = None
    counts: Tensor | None = None
    kept: Tensor | None = None
    sampled: Tensor | None = None
    ends: Tensor | None = None
    looks: tuple[Any, ...] | None = None

    @property
    def stops(self) -> Tensor:
        """[B] the tokens of each sample in all."""
        return self.starts + self.lengths if self.ends is None else self.ends

    def select(self, rows: Tensor) -> Self:
        """The samples in `rows` [b]."""
        values: dict[str, Any] = {name: value[rows] for name, value in self._tensors.items()}
        if self.looks is not None:
            values["looks"] = tuple(self.looks[row] for row in rows.tolist())
        return replace(self, **values)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See phalanx.types.Trace."""
        values: dict[str, Any] = {}
        for name in parts[0]._tensors:
            tensors = [part._tensors[name] for part in parts]
            values[name] = torch.cat(widened(tensors) if name == "kept" else tensors)
        if parts[0].looks is not None:
            values["looks"] = sum((part.looks or () for part in parts), ())
        return replace(parts[0], **values)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """All of them have a row for each sample."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def trimmed(self) -> Self:
        """The same, no wider than the longest of these samples."""
        width = int(self.stops.max())
        sampled = None if self.sampled is None else self.sampled[:, :width]
        return replace(self, ids=self.ids[:, :width], sampled=sampled)

    def rescored(self, replays: Sequence[Any], parts: Sequence[Tensor]) -> Self:
        """The trace with the policy's certainty [B], and with the tokens that were kept unless it has them; each of
        `replays` is of the samples whose rows are in its part [b].
        """
        values = in_order([replay.self_certainty for replay in replays], parts)
        trace = replace(self, certainty=values.sum(1) / self.lengths.clamp(min=1))
        if self.kept is not None or replays[0].kept is None:
            return trace
        counts = in_order([replay.counts for replay in replays], parts)
        return replace(trace, counts=counts, kept=in_order(widened([replay.kept for replay in replays]), parts))

    @property
    def pool(self) -> tuple[Tensor, Tensor] | None:
        """The kept tokens of all tokens of the responses, one after the other, and the number of each, [N]."""
        if self.kept is None:
            return None
        assert self.counts is not None, "both or none"
        return self.kept[up_to(self.counts.sum(1), self.kept.shape[1])], self.counts[self.mask]

    def pooled(self, kept: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """`counts` [B, A] and `kept` [B, K] of these samples, of kept [M] and counts [N] as `pool` gives them."""
        zeros = torch.zeros(self.mask.shape, dtype=torch.int32, device=kept.device)
        filled = zeros.masked_scatter(self.mask, counts)
        totals = filled.sum(1)
        places = up_to(totals, int(totals.max()))
        return filled, torch.zeros(places.shape, dtype=torch.int32, device=kept.device).masked_scatter(places, kept)

    @property
    def mask(self) -> Tensor:
        """[B, A] bool: the tokens of the responses."""
        return up_to(self.lengths, self.width)

    @property
    def responses(self) -> Tensor:
        """[B, T] bool: where the tokens of the responses stand in ids."""
        if self.sampled is not None:
            return self.sampled
        at = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (at >= self.starts[:, None]) & (at < (self.starts + self.lengths)[:, None])

    @property
    def predicting(self) -> Tensor:
        """[B, T - 1] bool: the positions that predict a response's tokens."""
        return self.responses[:, 1:]


@dataclass(frozen=True)
class TokenReplay(Replay):
    """The policy's view of given tokens: log_prob, entropy and self_certainty, each [B, A] float32, 0 behind a
    response's end; `counts` and `kept`: see TokenTrace.
    """

    entropy: Tensor
    self_certainty: Tensor
    counts: Tensor | None = None
    kept: Tensor | None = None


def token_scores(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    temperature: float,
    chunk: int,
    never: Sequence[int] = (),
    pool: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` [N], and entropy and self-certainty of the distributions they are drawn from, in
    which the tokens `never` have no part.

    hidden [N, H] are the states that `head` makes logits [N, V] of, of which never more than `chunk` rows are in
    memory, in the backward pass either, which computes them again. All results are [N] float32. The self-certainty is
    that of Intuitor (arXiv 2505.19590): logsumexp(z) - mean(z), the mean over the vocabulary of -log p.

    Of truncated distributions `pool` are the tokens that are kept, see sampled_from, of which log-probabilities and
    entropy are; the self-certainty is that of the whole distribution.
    """
    score = partial(_scores, head, temperature=temperature, never=never)
    parts = []
    chunks = hidden.split(chunk)
    pools: list[tuple[Tensor, ...]] = [()] * len(chunks)
    if pool is not None:
        counts = pool[1].split(chunk)
        pools = list(zip(pool[0].split([int(part.sum()) for part in counts]), counts, strict=True))
    for states, targets, kept in zip(chunks, tokens.split(chunk), pools, strict=True):
        if len(hidden) > chunk and torch.is_grad_enabled():
            parts.append(checkpoint(score, states, targets, *kept, use_reentrant=False))
        else:
            parts.append(score(states, targets, *kept))
    if not parts:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty, empty
    log_prob, entropy, certainty = (torch.cat(values) for values in zip(*parts, strict=True))
    return log_prob, entropy, certainty


@torch.no_grad()
def sampled_from(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    truncation: Truncation,
    *,
    temperature: float,
    chunk: int,
    never: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """The tokens [K] int32 among which each of `tokens` [N] was drawn, one after the other, and how many those are,
    [N] int32; see token_scores. A token is always among its own, whatever the last bits of its logits say.
    """
    kept, counts = [hidden.new_zeros(0, dtype=torch.int32)], [hidden.new_zeros(0, dtype=torch.int32)]
    for states, targets in zip(hidden.split(chunk), tokens.split(chunk), strict=True):
        logits = head(states)
        if never:
            logits = logits.index_fill(-1, torch.tensor(never, device=logits.device), FAR)
        for z, token in zip(logits.split(ROWS), targets.split(ROWS), strict=True):
            inside = truncation.kept(torch.softmax(z.float() / temperature, -1).double())
            inside.scatter_(1, token[:, None], True)
            kept.append(inside.nonzero()[:, 1].int())
            counts.append(inside.sum(1).int())
    return torch.cat(kept), torch.cat(counts)


def widened(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors [b, K] with zeros behind, up to the greatest K."""
    width = max(tensor.shape[1] for tensor in tensors)
    return [pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]


def up_to(counts: Tensor, width: int) -> Tensor:
    """[B, width] bool: the first counts [B] of each row."""
    return torch.arange(width, device=counts.device) < counts[:, None]


def _scores(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    kept: Tensor | None = None,
    counts: Tensor | None = None,
    *,
    temperature: float,
    never: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    z = head(hidden).float() / temperature
    mean = z.mean(-1)
    if never:
        at = torch.tensor(never, device=z.device)  # once: the host waits for such a copy
        mean = (mean * z.shape[-1] - z.index_select(-1, at).sum(-1)) / (z.shape[-1] - len(never))
        z = z.index_fill(-1, at, torch.finfo(z.dtype).min)
    if kept is not None and counts is not None:
        outside = torch.ones_like(z, dtype=torch.bool)
        outside[torch.arange(len(z), device=z.device).repeat_interleave(counts), kept.long()] = False
        certainty = z.logsumexp(-1) - mean
        z = z.masked_fill(outside, FAR)
        total = z.logsumexp(-1)
        log_prob = z.gather(1, tokens[:, None]).squeeze(1) - total
        return log_prob, total - (torch.softmax(z, -1) * z).sum(-1), certainty
    total = z.logsumexp(-1)
    log_prob = z.gather(1, tokens[:, None]).squeeze(1) - total
    entropy = total - (torch.softmax(z, -1) * z).sum(-1)
    return log_prob, entropy, total - mean


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """ids and mask [P, longest], int64, of prompts that end together, as decoding wants them."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for i, prompt in enumerate(prompts):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    return ids, mask
