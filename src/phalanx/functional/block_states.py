"""Block diffusion: evaluate many noisy states of a sequence's blocks in one forward pass.

A response is denoised block by block, each from S mask tokens (BD3-LM, https://arxiv.org/abs/2503.09573); a block
attends to itself and to the clean blocks before it. A row of a pass is

    [ clean tokens (L) ; state 1 (S) ; state 2 (S) ; ... ]

with any number of states, each of which is one block at some time of its denoising. Three integers per position
determine its attention: `block` (the position of its block in the sequence), `chunk` (0 in the clean part; states with
equal chunks attend to each other) and `limit`:

    i attends to j  <=>  chunk_j = chunk_i and block_j <= block_i   or   chunk_j = 0 and block_j < limit_i

Supervised training has one state per block (dFactory's [x_t ; x_0] is the same with states of the prompt as well); the
replay of a rollout has one state per block and denoising step. Padding is in later blocks, to which nothing attends.

Shapes: B samples, T tokens of the longest prompt with its response, K = T / S blocks of these, A tokens of the longest
response, V views per block, C states per sample. Blocks are counted from the first token of a prompt.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.functional.tokens import TokenTrace


@dataclass(frozen=True, kw_only=True)
class BlockTrace(TokenTrace):
    """Prompts and responses that fill whole blocks, with the order of unmasking.

    step: [B, A], the denoising step of its block in which each token was unmasked. seeds: [B], for estimates with
    random masks. states: the largest number of states of a sample, over all ranks. size: S.
    """

    step: Tensor
    seeds: Tensor
    states: int
    size: int

    @property
    def steps(self) -> Tensor:
        """[B, K, S] the denoising step of each token, -1 for prompts and padding."""
        grid = torch.full_like(self.ids, -1).masked_scatter(self.responses, self.step[self.mask])
        return grid.unflatten(1, (-1, self.size))


@dataclass(frozen=True)
class Views:
    """The views of each block to evaluate.

    masked: [B, K, V, S] bool. weight: [B, K, V, S], of each token's log-probability, 0 for tokens that are not needed;
    a view with only zeros becomes no state. known: None: each state attends to itself and to all clean blocks before
    it. [B]: the states of a view also attend to the states of earlier blocks, but only to the first `known` clean
    blocks.
    """

    masked: Tensor
    weight: Tensor
    known: Tensor | None = None

    @property
    def count(self) -> Tensor:
        """[B] the number of states of each sample."""
        return (self.weight != 0).any(-1).flatten(1).sum(1)


@dataclass(frozen=True)
class States:
    """The rows of a pass.

    tokens, positions, block, chunk, limit: [B, L + C S], see above. For the tokens of states, each [B, C, S]: weight,
    see Views; target, the clean token; place, its position in the sequence; at, its position in the row.
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
        """Move all tensors to a device."""
        return States(**{name: value.to(device) for name, value in vars(self).items()})

    def closed(self, clean: Tensor) -> "States":
        """Remove the padding after the first `clean` [B] tokens and after the states, and trim to the longest row."""
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
        """[B, 1, L + C S, L + C S] bool: whether each position (row) attends to each other (column)."""

        def pair(values: Tensor) -> tuple[Tensor, Tensor]:
            return values[:, None, :, None], values[:, None, None, :]

        (block_q, block_k), (chunk_q, chunk_k), limit = pair(self.block), pair(self.chunk), self.limit[:, None, :, None]
        return sees(block_q, chunk_q, limit, block_k, chunk_k)


def sees(block_q: Tensor, chunk_q: Tensor, limit_q: Tensor, block_k: Tensor, chunk_k: Tensor) -> Tensor:
    """The attention rule above, elementwise, for dense masks as well as FlexAttention.

    Takes the integers of query and key positions, of shapes that broadcast, and returns bool of the broadcast shape.
    """
    return ((chunk_k == chunk_q) & (block_k <= block_q)) | ((chunk_k == 0) & (block_k < limit_q))


def states_of(ids: Tensor, views: Views, *, mask_id: int, count: int) -> States:
    """Build the rows for all `views` of ids [B, T], padded to `count` states per sample."""
    batch, device = len(ids), ids.device
    blocks, kinds, size = views.weight.shape[1:]
    needed = (views.weight != 0).any(-1).flatten(1)
    # the views that are needed come first, in their original order
    order = needed.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
    real = needed.gather(1, order)
    of, view = order // kinds, order % kinds

    def pick(values: Tensor) -> Tensor:
        """[B, K, V, S] -> [B, C, S]."""
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
    # nothing attends to the clean tokens of the last block
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
    """The views in which the log-probabilities of responses are evaluated.

    estimate: `trace` is exact: the states of the rollout, each token in the state in which it was unmasked. The others
    are estimates from the literature with fewer states:

    - block_mean_field: each block completely masked, after its clean past.
    - mean_field: all blocks masked at once, after the prompt (d1, arXiv 2504.12216).
    - elbo: each token masked with probability t ~ U(0, 1), with weight 1/t.
    - coupled: the mean of completely masked blocks and of two complementary masks; a token is in the first with
      probability t ~ U(.2, .8), with weights 1/t and 1/(1 - t) (DiffuCoder, arXiv 2506.20639).
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
    streams = [torch.Generator().manual_seed(seed) for seed in trace.seeds.tolist()]
    drawn = torch.stack([torch.rand(1 + step[0].numel(), generator=stream) for stream in streams]).to(step.device)
    t, uniform = drawn[:, :1, None], drawn[:, 1:].view(step.shape)  # of the masking rate, and of each token
    if estimate == "elbo":
        masked = (real & (uniform < t))[:, :, None]
        return Views(masked, masked / t[..., None])
    t = 0.2 + 0.6 * t  # the authors' range
    first, second = real & (uniform < t), real & (uniform >= t)
    masked = torch.stack([real, first, second], 2)
    weight = torch.stack([real / 2, first / t / 2, second / (1 - t) / 2], 2)
    return Views(masked, weight)


def of_responses(trace: BlockTrace, states: States, values: Tensor) -> Tensor:
    """[B, A] the weighted sum of the values of each token of the responses; values [N] of the tokens of weight != 0."""
    needed = states.weight != 0
    rows, _, _ = needed.nonzero(as_tuple=True)
    at = states.place[needed] - trace.starts[rows]
    zeros = torch.zeros(len(trace.ids), trace.width, dtype=values.dtype, device=values.device)
    return zeros.index_put((rows, at), values * states.weight[needed], accumulate=True)


def confident(confidence: Tensor, masked: Tensor, *, least: int, threshold: float) -> Tensor:
    """[B, S] bool: the masked positions to unmask now: all above the threshold if these are at least `least`, otherwise
    the `least` most confident ones (LLaDA2.0, arXiv 2512.15745).
    """
    values = confidence.masked_fill(~masked, -1.0)
    rank = values.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    sure = masked & (values > threshold)
    return torch.where(sure.sum(-1, keepdim=True) >= least, sure, masked & (rank < least))


def least_unmasked(size: int, steps: int) -> list[int]:
    """The minimum number of tokens that each of `steps` denoising steps of a block unmasks."""
    return [size // steps + (i < size % steps) for i in range(steps)]
