"""Encoding the prompts of several training steps at once: text encoders are slow to move."""

import logging
from collections.abc import Callable

from phalanx.types import Prompt

log = logging.getLogger(__name__)

# Training steps whose prompts are encoded at once, at most: fewer where the cache would forget the first of them before
# they are sampled. Qwen-Image's embeddings of a text of 200 tokens, 3584 wide in bfloat16, are 1.4 MB. Qwen-Image-Edit
# adds some 212 tokens, of image and template, and the image's latents, 0.5 MB at 1024 x 1024 pixels: 3.5 MB, and the
# negative's at most as much. 48 prompts on 8 ranks are then 42 MB per step and rank, and 32 steps fit in half of the
# cache's 4 GiB; on one rank it is 336 MB, and 6 do. The first Qwen-Image-Edit sees 1369 tokens of an image, 24 MB per
# prompt: 15 steps on 8 ranks, and 1 on one.
ENCODE_AHEAD = 32


class EncodeAhead:
    """Prompts, encoded up to step `until` by the rollout and by teachers with their own encoders.

    `encoders` are PolicyRollout.encode of each.
    """

    def __init__(self, encode: Callable[[list[list[Prompt]]], int]) -> None:
        self.encoders = [encode]
        self.until: int | None = None
        self._room: int | None = None  # steps whose embeddings the cache holds

    def reach(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Encode what `step` needs and, up to `end`, as much of what follows as there is room for.

        `batches(k)` are the prompts of step k.
        """
        if self.until is not None and step < self.until:
            return
        if self._room is None:  # the first prompts show how large embeddings are
            prompts = batches(step)
            log.info("encoding %d prompts", len(prompts))
            self._room = self._encode([prompts])
        # by the step and not by what a rank's cache has: all ranks must encode at the same steps
        self.until = min(step + self._room, end)
        self._room = self._encode([batches(k) for k in range(step, self.until)])

    def _encode(self, prompts: list[list[Prompt]]) -> int:
        """Encode, and return the number of steps, at most ENCODE_AHEAD, that the caches can hold."""
        room = [encode(prompts) for encode in self.encoders]
        return max(1, min(ENCODE_AHEAD, *room))
