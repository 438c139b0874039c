"""Whether an engine holds the weights that it was sent, bit for bit."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from phalanx.engines.loading import listed

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


log = logging.getLogger(__name__)


class Receipt:
    """Compares an engine's weights with what was sent in blocks of rows, wherever the engine keeps each block: engines
    concatenate tensors, split their rows or columns between `shards` ranks, and order rows in their own way.

    A kind of tensor, such as one layer type of all layers, of which the first comparison finds less than half of the
    blocks is kept in another form, as quantised weights are: it is logged once and not compared, unless `strict`.
    """

    def __init__(self, shards: int, key: str = "rollout.engine", *, strict: bool = False) -> None:
        """key: the configuration key of the engine, for messages."""
        self._shards, self._key, self._strict = shards, key, strict
        self._sent: dict[str, Tensor] = {}
        self._compared: dict[str, bool] = {}  # by kind, from the first comparison in which one was not 0
        self._dtype = torch.float32

    def noted(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same weights, in the dtype in which the engine gets them, noted on their way."""
        self._sent = {}
        for name, tensor in weights:
            self._sent[name], self._dtype = fingerprints(tensor.detach(), self._shards), tensor.dtype
            yield name, tensor

    def missing(self, kept: Iterable[Tensor], union: Callable[[Tensor], Tensor]) -> list[str]:
        """Names of the sent tensors that are not among those that the engine has `kept`.

        union: collective; of bool [K] of each rank that shares the weights, whether any is true.
        """
        held = []
        for weight in kept:
            # a router in float32 holds exactly the bfloat16 numbers that it was sent
            cast = weight.data.to(self._dtype) if weight.dtype.is_floating_point else weight.data
            for parts in {1, self._shards}:
                held.append(fingerprints(cast, parts))
        sent, sizes = torch.cat([*self._sent.values()]), list(map(len, self._sent.values()))
        here, zero = torch.stack([torch.isin(sent, torch.cat(held)), sent == 0]).cpu()
        missing = ~(union(here) | zero)  # blocks of zeros are everywhere
        tensors = zip(self._sent, missing.split(sizes), zero.split(sizes), strict=True)
        absent, total, names = Counter[str](), Counter[str](), []
        for name, lost, empty in tensors:
            absent[kind(name)] += int(lost.sum())
            total[kind(name)] += int((~empty).sum())
            if bool(lost.any()):
                names.append(name)
        foreign = []
        for name, blocks in total.items():
            if blocks and name not in self._compared:
                self._compared[name] = self._strict or 2 * absent[name] <= blocks
                if not self._compared[name]:
                    foreign.append(name)
        if foreign:
            listing = listed(foreign)
            log.warning("%s: vLLM keeps %s in another form; only a probe verifies its copy", self._key, listing)
        return [name for name in names if self._compared[kind(name)]]


def kind(name: str) -> str:
    """The name of a tensor without the numbers of its layer and of its expert."""
    return re.sub(r"\d+", "#", name)
