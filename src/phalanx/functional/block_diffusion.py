"""Block diffusion: noisy states of a sequence's blocks, many of them in one forward pass, and their log-probabilities.

A response is denoised block by block, S tokens each, from S mask tokens (BD3-LM, https://arxiv.org/abs/2503.09573): a
block sees itself and the clean blocks before it. A row of a pass is

    [ clean tokens (L) ; state 1 (S) ; state 2 (S) ; ... ]

with any number of states, each of one block at some time. Three integers per position say what it attends to, `block`
(where it stands in the sequence), `chunk` (0 in the clean part, else which states see one another) and `limit`:

    i sees j  <=>  chunk_j = chunk_i and block_j <= block_i   or   chunk_j = 0 and block_j < limit_i

Supervised training has a state for each block (dFactory's [x_t ; x_0] is that with the prompt's states kept); the
replay of a rollout has one for each block and denoising step. Padding stands in later blocks, which nothing sees.

Shapes: B samples, T tokens of the longest prompt with its response, K = T / S blocks of it, A tokens of the longest
response, V views of a block, C states of a sample. Blocks are counted from the first token of a prompt.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.functional.tokens import TokenTrace


@dataclass(frozen=True, kw_only=True)
class BlockTrace(TokenTrace):
    """Prompts with their responses, which end with a block, and the order in which these were unmasked: step [B, A],
    the denoising step of its block of each token; seeds [B], of estimates that draw. `states` are the most states of a
    sample, on all ranks, and `size` is S.
    """

    step: Tensor
    seeds: Tensor
    states: int
    size: int

    @property
    def steps(self) -> Tensor:
        """[B, K, S] the denoising step of each token, -1 where there is none."""
        grid = torch.full_like(self.ids, -1).masked_scatter(self.responses, self.step[self.mask])
        return grid.unflatten(1, (-1, self.size))


@dataclass(frozen=True)
class Views:
    """States to look at: masked [B, K, V, S] bool, and the weight [B, K, V, S] of what the model says of each token
    there, 0 for tokens that it is not asked about. A view of a block without any is no state.

    The states of a sample do not see one another, and each sees all clean blocks before its own. With `known` [B] they
    see those before them, and only the first `known` clean blocks.
    """

    masked: Tensor
    weight: Tensor
    known: Tensor | None = None

    @property
    def count(self) -> Tensor:
        """[B] states of each sample."""
        return (self.weight != 0).any(-1).flatten(1).sum(1)


@dataclass(frozen=True)
class States:
    """Rows of a pass: tokens, positions, block, chunk, limit, each [B, L + C S]; weight [B, C, S], and of each token of
    a state what it becomes, target [B, C, S], where that stands in the sequence, place [B, C, S], and where the token
    itself stands in its row, at [B, C, S].
    """

    tokens: Tensor
    positions: Tensor
    block: Tensor
    chunk: Tensor
    limit: Tensor
    weight: Tensor
    target: Tensor
    place: Tensor
    at: Tensor

    def to(self, device: torch.device) -> "States":
        """The same on a device."""
        return States(**{name: value.to(device) for name, value in vars(self).items()})

    def closed(self, clean: Tensor) -> "States":
        """The same rows without what pads their first `clean` [B] tokens, no wider than the longest needs to be."""
        length, size = int(self.at.min()), self.weight.shape[2]
        count = (self.weight != 0).any(-1).sum(1)
        column = torch.arange(self.tokens.shape[1], device=clean.device)
        padding = (column >= clean[:, None]) & (column < length) | (column >= (length + count * size)[:, None])
        order = padding.to(torch.uint8).argsort(dim=1, stable=True)
        kept = order[:, : int((~padding).sum(1).max())]
        rows = {name: vars(self)[name].gather(1, kept) for name in ("tokens", "positions", "block", "chunk", "limit")}
        at = order.argsort(dim=1).gather(1, self.at.flatten(1)).view_as(self.at)
        return replace(self, **rows, at=at)

    def allowed(self) -> Tensor:
        """[B, 1, L + C S, L + C S] bool: what each position (row) attends to."""

        def pair(values: Tensor) -> tuple[Tensor, Tensor]:
            return values[:, None, :, None], values[:, None, None, :]

        (block_q, block_k), (chunk_q, chunk_k), limit = pair(self.block), pair(self.chunk), self.limit[:, None, :, None]
        return sees(block_q, chunk_q, limit, block_k, chunk_k)


def sees(block_q: Tensor, chunk_q: Tensor, limit_q: Tensor, block_k: Tensor, chunk_k: Tensor) -> Tensor:
    """The rule above, element by element: for a dense mask and for FlexAttention alike.

    Integers of query and key positions, of shapes that broadcast -> bool of the shape that they broadcast to.
    """
    return ((chunk_k == chunk_q) & (block_k <= block_q)) | ((chunk_k == 0) & (block_k < limit_q))


def states_of(ids: Tensor, views: Views, *, mask_id: int, count: int) -> States:
    """The rows in which all `views` of ids [B, T] are seen, padded to `count` states per sample."""
    batch, device = len(ids), ids.device
    blocks, kinds, size = views.weight.shape[1:]
    wanted = (views.weight != 0).any(-1).flatten(1)
    # those that are wanted first, in their order
    order = wanted.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
    real = wanted.gather(1, order)
    of, view = order // kinds, order % kinds

    def pick(values: Tensor) -> Tensor:
        """[B, C, S] of values [B, K, V, S]."""
        return values.flatten(1, 2).gather(1, order[..., None].expand(-1, -1, size))

    final = ids.unflatten(1, (blocks, size))[:, :, None].expand(-1, -1, kinds, -1)
    target, masked, weight = pick(final), pick(views.masked), pick(views.weight) * real[..., None]
    block = torch.where(real, of, -1)
    if views.known is None:
        chunk, limit = torch.arange(1, order.shape[1] + 1, device=device).expand(batch, -1), block
    else:
        chunk = torch.ones_like(view) + torch.where(real, view, kinds)
        limit = views.known[:, None].expand_as(block)
    place = of[..., None] * size + torch.arange(size, device=device)
    # nothing sees the clean tokens of the last block
    at = torch.arange(ids.shape[1] - size, device=device).expand(batch, -1)

    def row(clean: Tensor, noisy: Tensor) -> Tensor:
        if noisy.dim() == 2:
            noisy = noisy[..., None].expand(-1, -1, size)
        return torch.cat([clean, noisy.flatten(1)], 1)

    zeros = torch.zeros_like(at)
    return States(
        tokens=row(ids[:, : at.shape[1]], target.masked_fill(masked, mask_id)),
        positions=row(at, place),
        block=row(at // size, block),
        chunk=row(zeros, chunk),
        limit=row(zeros, limit),
        weight=weight,
        target=target,
        place=place,
        at=at.shape[1] + torch.arange(place[0].numel(), device=device).view_as(place[0]).expand_as(place),
    )


def replayed(trace: BlockTrace, estimate: str = "trace") -> Views:
    """The states in which the tokens of responses are looked at.

    trace: those that the rollout went through, each token in the state that it was unmasked in, exactly. Estimates of
    what the literature takes in place of these, at one or two states per block: block_mean_field, each block all masked
    behind its clean past; mean_field, all blocks masked at once behind the prompt (d1, arXiv 2504.12216); elbo, each
    token masked with probability t ~ U(0, 1), of weight 1/t; coupled, the mean of all masked and of two complementary
    halves, a token masked in the first with probability t ~ U(.2, .8), of weight 1/t and 1/(1 - t) (DiffuCoder, arXiv
    2506.20639).
    """
    step = trace.steps
    real = step >= 0
    if estimate == "trace":
        now = torch.arange(trace.size, device=step.device)[:, None]
        step = step[:, :, None]
        return Views(step >= now, (step == now).float())
    if estimate in ("block_mean_field", "mean_field"):
        masked = real[:, :, None]
        return Views(masked, masked.float(), trace.starts // trace.size if estimate == "mean_field" else None)
    drawn = torch.stack([_uniform(seed, step.shape[1:].numel()) for seed in trace.seeds.tolist()]).to(step.device)
    t, uniform = drawn[:, :1, None], drawn[:, 1:].view(step.shape)
    if estimate == "elbo":
        masked = (real & (uniform < t))[:, :, None]
        return Views(masked, masked / t[..., None])
    t = 0.2 + 0.6 * t  # as the authors draw it
    first, second = real & (uniform < t), real & (uniform >= t)
    masked = torch.stack([real, first, second], 2)
    weight = torch.stack([real / 2, first / t / 2, second / (1 - t) / 2], 2)
    return Views(masked, weight)


def _uniform(seed: int, count: int) -> Tensor:
    """A rate, and a uniform number for each token."""
    return torch.rand(1 + count, generator=torch.Generator().manual_seed(seed))


def of_responses(trace: BlockTrace, states: States, values: Tensor) -> Tensor:
    """[B, A] the weighted sums for each token of the responses; values [N] are those of the tokens of weight != 0."""
    asked = states.weight != 0
    rows, _, _ = asked.nonzero(as_tuple=True)
    at = states.place[asked] - trace.starts[rows]
    zeros = torch.zeros(len(trace.ids), trace.width, dtype=values.dtype, device=values.device)
    return zeros.index_put((rows, at), values * states.weight[asked], accumulate=True)


def confident(confidence: Tensor, masked: Tensor, *, least: int, threshold: float) -> Tensor:
    """[B, S] bool: the masked positions that are unmasked now. Those above the threshold where they are at least
    `least`, else the `least` most confident (LLaDA2.0, arXiv 2512.15745).
    """
    values = confidence.masked_fill(~masked, -1.0)
    rank = values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    sure = masked & (values > threshold)
    return torch.where(sure.sum(-1, keepdim=True) >= least, sure, masked & (rank < least))


def least_unmasked(size: int, steps: int) -> list[int]:
    """Tokens that each of `steps` denoising steps of a block unmasks at least."""
    return [size // steps + (i < size % steps) for i in range(steps)]
