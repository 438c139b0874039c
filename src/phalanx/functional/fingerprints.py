"""Fingerprints of blocks of weights, the same in a tensor, in a concatenation of several, and in a shard."""

from functools import cache

import torch
from torch import Tensor

ROWS = 8  # of a block; heads, widths of layers and their shards are multiples of it
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
CHUNK = 2**22  # words hashed at once, which bounds the memory of their products


def fingerprints(tensor: Tensor, parts: int = 1) -> Tensor:
    """Hash the bytes of each block of ROWS rows, divided into `parts` of equal width if the width permits it.

    The hash is the sum of the block's words times fixed odd numbers mod 2^64: one changed word always changes it.

    Args:
        tensor: [..., W], whose leading dims are rows; with 4 or more dims, as of a convolution, only the first is. The
            entries of a vector [N] are its rows.
        parts: number of shards into which an engine may have split the rows.

    Returns:
        [blocks x parts] int64, 0 for zeros only. Rows that the last block lacks count as zeros.
    """
    if not tensor.numel():
        return torch.empty(0, dtype=torch.int64, device=tensor.device)
    tensor = tensor.flatten(1) if tensor.ndim > 3 else tensor.contiguous()
    if tensor.ndim < 2:
        rows = tensor.reshape(-1, 1)
        rows = torch.cat([rows, rows.new_zeros(-len(rows) % ROWS, 1)]).view(-1, 1, 1, ROWS)
    else:
        width = tensor.shape[-1]
        rows = tensor.reshape(-1, width)
        if len(rows) % ROWS:
            rows = torch.cat([rows, rows.new_zeros(-len(rows) % ROWS, width)])
        rows = rows.view(-1, ROWS, parts, width // parts) if width % parts == 0 else rows.view(-1, ROWS, 1, width)
    if rows.storage_offset() * rows.itemsize % 8:
        rows = rows.clone()  # words must be aligned
    width = rows.shape[-1] * rows.itemsize
    words = rows.view(WORDS[next(size for size in WORDS if width % size == 0)])
    odd = _odd_numbers(words[:1, :, :1].numel(), words.device).view(words.shape[1], 1, -1)
    sums = []
    for chunk in words.split(max(1, CHUNK // words[:1].numel())):
        sums.append((chunk * odd).sum((1, 3)).flatten())
    return torch.cat(sums)


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Odd numbers [count], the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator).mul(2).add(1).to(device)
