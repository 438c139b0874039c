"""The passes through the model in which samples are replayed, on all ranks equally many."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.distributed.collectives import reduce_int
from phalanx.functional.token_budget import needed, split


@dataclass(frozen=True)
class Passes:
    """Passes of `micro` units (samples, or those that are trained as one), or of at most `budget` tokens: those of
    padded samples, or of `packed` ones. `adjacent`: such passes have units that follow one another.
    """

    micro: int
    budget: int | None = None
    packed: bool = False
    adjacent: bool = False

    def parts(self, units: int, tokens: Tensor | None) -> list[Tensor]:
        """The places of this rank's units, part by part; `tokens` [units, s] are the lengths of their samples.

        All ranks call it in step with equally many units.
        """
        if self.budget is None:
            return list(torch.arange(units).split(self.micro))
        assert tokens is not None, "a budget of tokens is of samples that have some"
        return self.within_budget(tokens, units)

    def within_budget(self, tokens: Tensor, wanted: int) -> list[Tensor]:
        """Parts with the first `wanted` units, beside which there are others only where another rank needs more parts
        than this one has units.
        """
        assert self.budget is not None
        number = 1
        while True:
            rows = tokens[: max(wanted, number)]
            parts = needed(rows, self.budget, packed=self.packed, adjacent=self.adjacent, least=number)
            agreed = reduce_int(parts, "max")
            if agreed == number:
                break
            number = agreed
        return [torch.tensor(part) for part in split(rows, number, packed=self.packed, adjacent=self.adjacent)]
