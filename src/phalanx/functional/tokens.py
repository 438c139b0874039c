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
from torch.utils.checkpoint import checkpoint

from phalanx.functional.token_budget import in_order
from phalanx.types import Replay


@dataclass(frozen=True)
class TokenTrace:
    """Prompts with their responses: ids [B, T], padded behind; starts [B], the prompts' lengths; lengths [B], those of
    the responses; `width`, A. `certainty` [B]: the mean self-certainty of each response, once the policy has said it.

    All ranks pad to the same T and A, so that each pass over some of the samples has one shape.
    """

    ids: Tensor
    starts: Tensor
    lengths: Tensor
    width: int
    certainty: Tensor | None = None

    def select(self, rows: Tensor) -> Self:
        """The samples in `rows` [b]."""
        values: dict[str, Any] = {name: value[rows] for name, value in self._tensors.items()}
        return replace(self, **values)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See phalanx.types.Trace."""
        names = parts[0]._tensors
        values: dict[str, Any] = {name: torch.cat([part._tensors[name] for part in parts]) for name in names}
        return replace(parts[0], **values)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """All of them have a row for each sample."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def trimmed(self) -> Self:
        """The same, no wider than the longest of these samples."""
        return replace(self, ids=self.ids[:, : int((self.starts + self.lengths).max())])

    def rescored(self, replays: Sequence[Any], parts: Sequence[Tensor]) -> Self:
        """The trace with the policy's certainty: nothing else depends on the weights."""
        values = in_order([replay.self_certainty for replay in replays], parts)
        return replace(self, certainty=values.sum(1) / self.lengths.clamp(min=1))

    @property
    def mask(self) -> Tensor:
        """[B, A] bool: the tokens of the responses."""
        return torch.arange(self.width, device=self.ids.device) < self.lengths[:, None]

    @property
    def responses(self) -> Tensor:
        """[B, T] bool: where the tokens of the responses stand in ids."""
        at = torch.arange(self.ids.shape[1], device=self.ids.device)
        return (at >= self.starts[:, None]) & (at < (self.starts + self.lengths)[:, None])

    @property
    def predicting(self) -> Tensor:
        """[B, T - 1] bool: the positions that predict a response's tokens."""
        return self.responses[:, 1:]


@dataclass(frozen=True)
class TokenReplay(Replay):
    """The policy's view of given tokens: log_prob, entropy and self_certainty, each [B, A] float32, 0 behind a
    response's end.
    """

    entropy: Tensor
    self_certainty: Tensor


def token_scores(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    temperature: float,
    chunk: int,
    never: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `tokens` [N], and entropy and self-certainty of the distributions they are drawn from, in
    which the token `never` has no part.

    hidden [N, H] are the states that `head` makes logits [N, V] of, of which never more than `chunk` rows are in
    memory, in the backward pass either, which computes them again. All results are [N] float32. The self-certainty is
    that of Intuitor (arXiv 2505.19590): logsumexp(z) - mean(z), the mean over the vocabulary of -log p.
    """
    score = partial(_scores, head, temperature=temperature, never=never)
    parts = []
    for states, targets in zip(hidden.split(chunk), tokens.split(chunk), strict=True):
        if len(hidden) > chunk and torch.is_grad_enabled():
            parts.append(checkpoint(score, states, targets, use_reentrant=False))
        else:
            parts.append(score(states, targets))
    if not parts:
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return empty, empty, empty
    log_prob, entropy, certainty = (torch.cat(values) for values in zip(*parts, strict=True))
    return log_prob, entropy, certainty


def _scores(
    head: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, *, temperature: float, never: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    z = head(hidden).float() / temperature
    mean = z.mean(-1)
    if never is not None:
        mean = (mean * z.shape[-1] - z[:, never]) / (z.shape[-1] - 1)
        z = z.index_fill(-1, torch.tensor([never], device=z.device), torch.finfo(z.dtype).min)
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
