"""Log-probability, entropy and self-certainty of tokens from their logits, with few passes over these.

With p = softmax(z / T) and its entropy H, the gradient for z is (g (onehot - p) - e p (log p + H)) / T, where g and e
are the gradients for log-probability and entropy. It needs only the logits and sums over them, so no float32 tensor of
their size outlives a pass.

Shapes: N tokens, V entries of the vocabulary.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FAR = -1e30  # the logit of a token that cannot be sampled
BLOCK = 2**18  # logits that a CPU handles at a time, whose float32 copies fit its caches


class TokenScores(torch.autograd.Function):
    """Log-probabilities of tokens [N], and entropy and self-certainty of their distributions, each [N] float32.

    Log-probabilities and entropy have gradients, of which only those that are used are computed; self-certainty has
    none. Results of float64 logits are float64.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        tokens: Tensor,
        temperature: float,
        never: Tensor | None,
        outside: Tensor | None,
        fused: bool,
        held: list[Tensor],
    ) -> tuple[Tensor, ...]:
        """logits: [N, V]. never: tokens that are excluded from the distributions. outside: [N, V] bool, tokens that
        are excluded from log-probability and entropy only. fused: by torch.compile. held: empty, or what an earlier
        call with equal arguments left in it, which is then not computed again.
        """
        fused = fused and len(logits) > 1  # a single row would need graphs of its own
        if not held:
            parts = []
            for rows in row_chunks(fused, logits, tokens, outside):
                parts.append(_compiled_if_fused(_score_values, fused)(*rows, temperature, never))
            held.extend(map(torch.cat, zip(*parts, strict=True)))
        log_prob, entropy, certainty = map(torch.clone, held[:3])
        ctx.save_for_backward(logits, tokens, never, outside, *held)
        ctx.temperature, ctx.fused = temperature, fused
        ctx.mark_non_differentiable(certainty)
        ctx.set_materialize_grads(False)
        return log_prob, entropy, certainty

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient [N, V] of the logits, in their dtype."""
        logits, tokens, never, outside, log_prob, entropy, _, total = ctx.saved_tensors
        g, e = gradients[:2]
        g = torch.zeros_like(log_prob) if g is None else g / ctx.temperature
        e = None if e is None else e / ctx.temperature
        slope = torch.empty_like(logits)
        for rows in row_chunks(ctx.fused, slope, logits, g, e, total, entropy, outside):
            _compiled_if_fused(_write_gradient, ctx.fused)(*rows, ctx.temperature, never)
        drawn = -torch.expm1(log_prob) * g
        if e is not None:
            drawn -= e * log_prob.exp() * (log_prob + entropy)
        slope.scatter_(1, tokens[:, None], drawn.to(slope.dtype)[:, None])
        if never is not None:
            slope.index_fill_(1, never, 0.0)
        return slope, *[None] * 6


def trial(device: torch.device) -> None:
    """Compile and run the fused scores of a few bfloat16 logits, and their gradient."""
    logits = torch.zeros(2, 1024, dtype=torch.bfloat16, device=device, requires_grad=True)
    tokens = torch.zeros(2, dtype=torch.long, device=device)
    TokenScores.apply(logits, tokens, 1.0, None, None, True, [])[0].sum().backward()


def row_chunks(fused: bool, first: Tensor, *rest: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """The tensors, on a CPU a few rows of each at a time."""
    count = len(first) if fused or first.device.type != "cpu" else max(BLOCK // first.shape[1], 1)
    for at in range(0, max(len(first), 1), count):  # a rank may have no tokens
        yield tuple(None if value is None else value[at : at + count] for value in (first, *rest))


@cache
def _compiled_if_fused(function: Callable[..., Any], fused: bool) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True) if fused else function


def _scale_logits(logits: Tensor, temperature: float, never: Tensor | None) -> Tensor:
    """The logits [N, V] over the temperature, at least in float32, with FAR for `never`."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1:
        z = z / temperature
    return z if never is None else z.index_fill(-1, never, FAR)


def _score_values(
    logits: Tensor, tokens: Tensor, outside: Tensor | None, temperature: float, never: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The three scores, and logsumexp(z / T)."""
    z, count = _scale_logits(logits, temperature, None), logits.shape[1]
    mean = z.mean(-1)
    if never is not None:
        mean = (mean * count - z.index_select(-1, never).sum(-1)) / (count - len(never))
        z = z.index_fill(-1, never, FAR)
    whole = None
    if outside is not None:
        whole = z.logsumexp(-1)
        z = z.masked_fill(outside, FAR)
    largest = z.amax(-1, keepdim=True)
    below = z - largest
    p = below.exp()
    sums = p.sum(-1)
    shift = sums.log()
    total = shift + largest.squeeze(1)
    log_prob = z.gather(1, tokens[:, None]).squeeze(1) - total
    entropy = shift - below.mul_(p).sum(-1) / sums
    return log_prob, entropy, (total if whole is None else whole) - mean, total


def _write_gradient(
    slope: Tensor,
    logits: Tensor,
    g: Tensor,
    e: Tensor | None,
    total: Tensor,
    entropy: Tensor,
    outside: Tensor | None,
    temperature: float,
    never: Tensor | None,
) -> None:
    """Write the gradient [N, V] of all entries but that of the token itself, -p (g + e (log p + H)), to `slope`."""
    z = _scale_logits(logits, temperature, never)
    if outside is not None:
        z = z.masked_fill(outside, FAR)
    log_p = z - total[:, None]
    if e is None:
        slope.copy_(log_p.exp_().mul_(-g[:, None]))
        return
    p = log_p.exp()
    slope.copy_(log_p.add_(entropy[:, None]).mul_(-e[:, None]).sub_(g[:, None]).mul_(p))
