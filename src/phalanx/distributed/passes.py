"""Division of samples into passes through the model, with the same number of passes on all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.distributed.collectives import reduce_int
from phalanx.functional.token_budget import needed, split


@dataclass(frozen=True)
class Passes:
    """Size of passes: `micro` units each (samples, or groups of samples trained as one), or at most `budget` tokens.

    packed: tokens are counted without padding. adjacent: a pass of the budget consists of consecutive units.
    """

    micro: int
    budget: int | None = None
    packed: bool = False
    adjacent: bool = False

    def parts(self, units: int, tokens: Tensor | None) -> list[Tensor]:
        """Indices of this rank's units in each pass. tokens: lengths of their samples, [units, s].

        All ranks call it together with the same number of units.
        """
        if self.budget is None:
            return list(torch.arange(units).split(self.micro))
        assert tokens is not None, "a budget of tokens needs the lengths of samples"
        return self.within_budget(tokens, units)

    def within_budget(self, tokens: Tensor, wanted: int) -> list[Tensor]:
        """Passes for the first `wanted` units. Further units are included only if another rank needs more passes than
        this rank has wanted units.
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
