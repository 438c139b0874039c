"""FlexAttention: its graph for all lengths, and masks of block diffusion without a mask of all pairs of tokens."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.integrations.flex_attention import WrappedFlexAttention

from phalanx.functional.block_states import States, sees
from phalanx.models.compiling import any_shape

TILE = 128  # rows and columns of a mask's tile, as in create_block_mask
AT_ONCE = 1 << 26  # pairs of tokens that are looked at together


def one_graph(backend: Any = "inductor") -> None:
    """Have transformers' FlexAttention compiled once for all lengths and numbers of rows, and once more for one row.

    By default torch compiles the first length alone, then a graph for each further dim that changes, each with and
    without gradients: kernels of different graphs may round differently, and beyond eight graphs attention is computed
    without kernels, with the scores of all pairs in memory.
    """
    any_shape()
    # attention modules stay in evaluation mode, for which transformers keeps one function
    WrappedFlexAttention(False)._compiled_flex_attention = torch.compile(flex_attention, dynamic=True, backend=backend)


@torch.no_grad()
def block_mask(states: States, at_once: int = AT_ONCE) -> BlockMask:
    """The mask of `States.allowed`, by `at_once` pairs of tokens at a time.

    It equals that of create_block_mask, which outside of a compiled region makes tensors of all pairs, of 4.3 GB each
    for 65,536 tokens.
    """
    block, chunk, limit = states.block, states.chunk, states.limit

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return sees(block[b, q], chunk[b, q], limit[b, q], block[b, k], chunk[b, k])

    rows, length = block.shape
    tiles = -(-length // TILE)
    inside = torch.nn.functional.pad(torch.ones_like(block, dtype=torch.bool), (0, tiles * TILE - length))
    padded = [torch.nn.functional.pad(values, (0, tiles * TILE - length)) for values in (block, chunk, limit)]
    some, every = [], []
    for part in torch.arange(tiles * TILE, device=block.device).split(
        TILE * max(at_once // (rows * tiles * TILE**2), 1)
    ):
        block_q, chunk_q, limit_q = (values[:, part, None] for values in padded)
        seen = sees(block_q, chunk_q, limit_q, padded[0][:, None], padded[1][:, None])
        seen &= inside[:, part, None] & inside[:, None]
        seen = seen.view(rows, -1, TILE, tiles, TILE)
        some.append(seen.any(4).any(2))
        every.append(seen.all(4).all(2))
    full = torch.cat(every, 1)
    partial = torch.cat(some, 1) & ~full  # [B, tiles, tiles]
    lists = (*_list_chosen(partial), *_list_chosen(full))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=TILE, mask_mod=rule, seq_lengths=(length, length))


def _list_chosen(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The number [B, 1, tiles] of chosen columns of each row, and all columns [B, 1, tiles, tiles], chosen first."""
    order = chosen.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1)[:, None].to(torch.int32), order[:, None].to(torch.int32).contiguous()
