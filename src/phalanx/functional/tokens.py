"""Data types of language models: sampled tokens and their log-probabilities.

Shapes: B samples of this rank, T tokens of the longest prompt with its response, A tokens of the longest response,
V tokens of the vocabulary, N tokens of all responses of a batch, sample by sample.
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
from phalanx.functional.looks import Look
from phalanx.functional.scores import FAR as FAR
from phalanx.functional.scores import TokenScores
from phalanx.functional.token_budget import in_order
from phalanx.types import Replay

ROWS = 64  # distributions that are sorted at a time, to bound memory


@dataclass(frozen=True)
class Truncation:
    """Truncated sampling: keep tokens with at least `min_p` times the largest probability, of these the `top_k` most
    likely (0 and -1: all), and of these the most likely ones that have `top_p` of the probability.
    """

    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, config: LMRolloutConfig | LMValRolloutConfig) -> Self:
        """The truncation of a configuration section."""
        return cls(config.top_k, config.top_p, config.min_p)

    @property
    def on(self) -> bool:
        """Whether any token may be left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def kept(self, p: Tensor) -> Tensor:
        """[N, V] bool: the tokens to keep of distributions p [N, V]; ties at the limit of top_k are all kept."""
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
class Decoding:
    """How responses are drawn: at most `limit` tokens, up to one of `ends` or a text of `stop`, and none of `never`;
    temperature 0 is greedy.
    """

    limit: int
    temperature: float
    ends: Sequence[int]
    pad: int
    truncation: Truncation = WHOLE
    never: Sequence[int] = ()
    stop: Sequence[str] = ()

    @property
    def draws(self) -> int:
        """Uniform numbers per token."""
        return 1


@dataclass(frozen=True)
class TokenTrace:
    """Prompts with their responses.

    ids: [B, T], right-padded. starts: [B], lengths of the prompts. lengths: [B], numbers of sampled tokens. width: A.
    certainty: [B], mean self-certainty of each response, once the policy has scored it.

    counts, kept: for truncated sampling, once the policy has scored the samples: [B, A] int32, the number of tokens
    that each token was sampled from, and [B, K] int32, these tokens, concatenated and right-padded.

    sampled, ends: for conversations: [B, T] bool, the tokens that the policy sampled (the others are the environment's
    answers, which are given like the prompt), and [B], the total number of tokens. None: all tokens after the prompt
    are sampled.

    looks: B entries, the images of each prompt or None; None: no prompt has any.

    All ranks pad to the same T and A, so that all passes have one shape.
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
    looks: tuple[Look | None, ...] | None = None

    @property
    def stops(self) -> Tensor:
        """[B] the total number of tokens of each sample."""
        return self.starts + self.lengths if self.ends is None else self.ends

    def select(self, rows: Tensor) -> Self:
        """The samples in `rows` [b]."""
        values: dict[str, Any] = {name: value[rows] for name, value in self._tensor_fields.items()}
        if self.looks is not None:
            values["looks"] = tuple(self.looks[row] for row in rows.tolist())
        return replace(self, **values)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See phalanx.types.Trace."""
        values: dict[str, Any] = {}
        for name in parts[0]._tensor_fields:
            tensors = [part._tensor_fields[name] for part in parts]
            values[name] = torch.cat(widened(tensors) if name == "kept" else tensors)
        if any(part.looks for part in parts):
            none = [(None,) * len(part.ids) for part in parts]
            values["looks"] = sum((part.looks or empty for part, empty in zip(parts, none, strict=True)), ())
        return replace(parts[0], **values)

    @property
    def _tensor_fields(self) -> dict[str, Tensor]:
        """The fields that are tensors; each has one row per sample."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def trimmed(self) -> Self:
        """Trim the padding to the longest of these samples."""
        width = int(self.stops.max())
        sampled = None if self.sampled is None else self.sampled[:, :width]
        return replace(self, ids=self.ids[:, :width], sampled=sampled)

    def rescored(self, replays: Sequence[Any], parts: Sequence[Tensor]) -> Self:
        """Add the policy's certainty [B] and, unless the trace has them, the kept tokens. Each of `replays` is for the
        samples in the rows `parts` [b].
        """
        values = in_order([replay.self_certainty for replay in replays], parts)
        trace = replace(self, certainty=values.sum(1) / self.lengths.clamp(min=1))
        if self.kept is not None or replays[0].kept is None:
            return trace
        counts = in_order([replay.counts for replay in replays], parts)
        return replace(trace, counts=counts, kept=in_order(widened([replay.kept for replay in replays]), parts))

    @property
    def pool(self) -> tuple[Tensor, Tensor] | None:
        """The kept tokens [M] of all response tokens, concatenated, and their numbers [N]."""
        if self.kept is None:
            return None
        assert self.counts is not None, "both or none"
        return self.kept[up_to(self.counts.sum(1), self.kept.shape[1])], self.counts[self.mask]

    def pooled(self, kept: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of `pool`: `counts` [B, A] and `kept` [B, K] from kept [M] and counts [N]."""
        zeros = torch.zeros(self.mask.shape, dtype=torch.int32, device=kept.device)
        filled = zeros.masked_scatter(self.mask, counts)
        totals = filled.sum(1)
        places = up_to(totals, int(totals.max()))
        return filled, torch.zeros(places.shape, dtype=torch.int32, device=kept.device).masked_scatter(places, kept)

    @property
    def mask(self) -> Tensor:
        """[B, A] bool: the real tokens of the responses."""
        return up_to(self.lengths, self.width)

    @property
    def responses(self) -> Tensor:
        """[B, T] bool: the positions of the response tokens in ids."""
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
    """The policy's view of given tokens: log_prob, entropy and self_certainty, each [B, A] float32, 0 for padding;
    `counts` and `kept`: see TokenTrace. Self-certainty has no gradient.
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
    fused: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` [N], and entropy and self-certainty of their distributions, each [N] float32.

    The self-certainty is that of Intuitor (arXiv 2505.19590): logsumexp(z) - mean(z), the mean over the vocabulary of
    -log p. It has no gradient.

    Args:
        hidden: [N, H], hidden states.
        head: maps hidden states to logits [N, V].
        chunk: maximum number of rows of logits in memory; the backward pass recomputes them.
        never: tokens that are excluded from the distributions.
        pool: for truncated sampling, the kept tokens and their numbers, see sampled_from. Log-probabilities and entropy
            are then those of the truncated distributions; the self-certainty is that of the whole distributions.
        fused: by kernels of torch.compile, which read the logits once or twice.
    """
    excluded = torch.tensor(never, device=hidden.device) if never else None
    parts = []
    chunks = hidden.split(chunk)
    pools: list[tuple[Tensor, ...]] = [()] * len(chunks)
    if pool is not None:
        counts = pool[1].split(chunk)
        pools = list(zip(pool[0].split([int(part.sum()) for part in counts]), counts, strict=True))
    for states, targets, kept in zip(chunks, tokens.split(chunk), pools, strict=True):
        # the values of a chunk are held, so that its recomputation needs only the logits
        score = partial(_head_scores, head, temperature=temperature, never=excluded, fused=fused, held=[])
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
    """The tokens from which each of `tokens` [N] was sampled, concatenated [M] int32, and their numbers [N] int32.

    For the other arguments see token_scores. The sampled token itself is always included, even if rounding of its
    logits would exclude it.
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
    """Pad tensors [b, K] with zeros to the largest K."""
    width = max(tensor.shape[1] for tensor in tensors)
    return [pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]


def up_to(counts: Tensor, width: int) -> Tensor:
    """[B, width] bool: True for the first `counts` [B] entries of each row."""
    return torch.arange(width, device=counts.device) < counts[:, None]


def _head_scores(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    kept: Tensor | None = None,
    counts: Tensor | None = None,
    *,
    temperature: float,
    never: Tensor | None,
    fused: bool,
    held: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    logits, outside = head(hidden), None
    if kept is not None and counts is not None:
        outside = torch.ones_like(logits, dtype=torch.bool)
        outside[torch.arange(len(logits), device=logits.device).repeat_interleave(counts), kept.long()] = False
    scores: tuple[Tensor, Tensor, Tensor] = TokenScores.apply(logits, tokens, temperature, never, outside, fused, held)
    return scores


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """ids and mask [P, longest], int64, of left-padded prompts, for decoding."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + [*prompt] for prompt in prompts], dtype=torch.long)
    mask = (torch.arange(longest) >= longest - torch.tensor(list(map(len, prompts)))[:, None]).long()
    return ids, mask
