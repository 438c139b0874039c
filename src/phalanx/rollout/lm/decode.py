"""Drawing tokens from logits.

A token is drawn by inverting the cumulative distribution at a uniform number that belongs to its place in the sample,
so it depends neither on the batch nor on the rank, up to rounding.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from phalanx.functional.scores import row_chunks
from phalanx.functional.tokens import FAR
from phalanx.functional.tokens import Decoding as Decoding

PART = 256  # tokens whose probabilities are summed first, so that only these sums and one part need float64


def draw(logits: Tensor, uniform: Tensor, decoding: Decoding) -> Tensor:
    """Draw tokens [B] from logits [B, V] float32 by uniform numbers [B]."""
    if decoding.never:
        logits = logits.clone()
        for token in decoding.never:  # as numbers: a CUDA graph cannot take an index from the host
            logits[:, token] = FAR
    if decoding.temperature == 0:
        return logits.argmax(-1)
    # on CPUs a sum in float64 copies what it adds: of a few rows, these copies stay in the cache
    return torch.cat([_invert(z, u, decoding) for z, u in row_chunks(False, logits, uniform)])


def _invert(logits: Tensor, uniform: Tensor, decoding: Decoding) -> Tensor:
    """Tokens [B] where the cumulative distributions of logits [B, V] reach `uniform` [B]."""
    p = _probabilities(logits, decoding)
    parts = pad(p, (0, -p.shape[-1] % PART)).view(len(p), -1, PART)
    ends = parts.sum(-1, dtype=torch.double).cumsum(-1)  # [B, V / PART]
    at = uniform.double()[:, None] * ends[:, -1:]
    part = torch.searchsorted(ends, at, right=True).clamp(max=ends.shape[-1] - 1)  # [B, 1]
    chosen = parts[torch.arange(len(p), device=p.device), part.squeeze(1)]
    within = chosen.double().cumsum(-1)  # [B, PART]
    # rounded differently than `ends`: kept within the part, so that no token of probability 0 is drawn
    rest = (at - pad(ends, (1, 0)).gather(1, part)).clamp(min=0).minimum(within[:, -1:] * (1 - 1e-15))
    place = part * PART + torch.searchsorted(within, rest, right=True)
    return place.squeeze(1).clamp(max=logits.shape[-1] - 1)  # of logits that are NaN too


def drawn_log_prob(logits: Tensor, tokens: Tensor, decoding: Decoding) -> Tensor:
    """Log-probabilities [B] float32 of tokens [B] that were drawn from logits [B, V] at a temperature above 0."""
    p = _probabilities(logits, decoding)
    of_tokens, total = p.gather(1, tokens[:, None]).squeeze(1).double(), p.sum(-1, dtype=torch.double)
    return (of_tokens / total).log().float()


def _probabilities(logits: Tensor, decoding: Decoding) -> Tensor:
    """The probabilities [B, V] of a draw, not normalized; 0 for the tokens that truncation excludes."""
    p = torch.softmax(logits if decoding.temperature == 1 else logits / decoding.temperature, -1)
    return p.masked_fill(~decoding.truncation.kept(p.double()), 0.0) if decoding.truncation.on else p
