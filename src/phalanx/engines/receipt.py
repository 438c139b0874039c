"""Whether an engine holds the weights that it was sent, bit for bit."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from phalanx.engines.loading import listed
from phalanx.functional.fingerprints import fingerprints

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
