"""Order in which training uses prompts and images."""

import logging
import math
import random
from dataclasses import replace
from functools import lru_cache

from phalanx.types import Prompt

logger = logging.getLogger(__name__)


class IndexStream:
    """Endless batches of the indices 0 .. size-1. (seed, epoch) determines the order within an epoch."""

    def __init__(self, size: int, batch_size: int, seed: int | str) -> None:
        self._size, self._batch_size, self._seed = size, batch_size, seed
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def batch(self, step: int) -> list[int]:
        """The indices of training step `step`, for all ranks."""
        first = step * self._batch_size
        numbers = []
        for place in range(first, first + self._batch_size):
            epoch, index = divmod(place, self._size)
            numbers.append(self._order(epoch)[index])
        return numbers

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(self._size))
        # Random hashes a string with SHA-512, which is the same in every process, unlike hash()
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


class PromptStream:
    """Endless batches of prompts, epoch by epoch, with a different order in each epoch.

    A batch depends only on (rows, batch_size, seed, step), so that every rank sees the same batch, and a resumed run
    continues as if it had not stopped. A batch may span two epochs; no prompt is left out.
    """

    ahead = True  # the prompts of later steps are known

    def __init__(self, rows: list[Prompt], batch_size: int, seed: int) -> None:
        assert rows and batch_size > 0, (len(rows), batch_size)
        self._rows = rows
        self._batch_size = batch_size
        self._numbers = IndexStream(len(rows), batch_size, seed)
        self._spare = IndexStream(len(rows), batch_size, f"{seed} spare")
        if batch_size > len(rows):
            logger.warning(
                "a batch of %d prompts exceeds the %d prompts of the data; it contains some of them several times",
                batch_size,
                len(rows),
            )

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of one training step, for all ranks. `group_id` counts them from 0."""
        return self.prompts(self.numbers(step))

    def numbers(self, step: int) -> list[int]:
        """The row numbers of one training step's prompts."""
        return self._numbers.batch(step)

    def prompts(self, numbers: list[int], first: int = 0) -> list[Prompt]:
        """The prompts of these rows. `group_id` counts them from `first`."""
        return [replace(self._rows[number], group_id=group_id) for group_id, number in enumerate(numbers, start=first)]

    def renewed(self, numbers: list[int], places: list[int], draw: int) -> list[int]:
        """The row numbers of a step, with those at `places` replaced by rows that the step does not have, if possible.

        The replacements come from a separate order, in which `draw` is the number of the batch. So later steps keep
        their rows, and a resumed run does not need to know what was drawn.
        """
        spare = list(dict.fromkeys(self._spare.batch(draw)))
        # small data may have no other prompts
        unlike = [number for number in spare if number not in numbers] or spare
        renewed = list(numbers)
        for i, place in enumerate(places):
            renewed[place] = unlike[i % len(unlike)]
        return renewed

    def steps(self, epochs: float) -> int:
        """Number of training steps for `epochs` passes over the data, rounded up."""
        # 0.1 * 30 / 3 is a little more than 1 in floating point
        return max(1, math.ceil(epochs * len(self._rows) / self._batch_size - 1e-9))
