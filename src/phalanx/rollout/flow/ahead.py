"""Encoding the prompts of several training steps at once, because moving text encoders to the device is slow."""

import logging
from collections.abc import Callable

from phalanx.types import Prompt

log = logging.getLogger(__name__)

# Maximum number of training steps whose prompts are encoded at once; fewer if the cache would evict the first of them
# before they are sampled. Qwen-Image's embeddings of a text of 200 tokens, 3584 wide in bfloat16, take 1.4 MB.
# Qwen-Image-Edit adds about 212 tokens for image and template, and the image's latents, 0.5 MB at 1024 x 1024 pixels:
# 3.5 MB, and at most as much for the negative prompt. With 48 prompts on 8 ranks that is 42 MB per step and rank, and
# 32 steps fit into half of the cache's 4 GiB; on one rank it is 336 MB, and 6 steps fit. The first Qwen-Image-Edit has
# 1369 tokens per image, 24 MB per prompt: 15 steps fit on 8 ranks, and 1 on one rank.
ENCODE_AHEAD = 32


class EncodeAhead:
    """Encodes prompts up to step `until`, for the rollout and for teachers with separate encoders.

    `encoders`: PolicyRollout.encode of each of them.
    """

    def __init__(self, encode: Callable[[list[list[Prompt]]], int]) -> None:
        self.encoders = [encode]
        self.until: int | None = None
        self._room: int | None = None  # number of steps whose embeddings fit into the cache

    def reach(self, batches: Callable[[int], list[Prompt]], step: int, end: int) -> None:
        """Encode the prompts of `step` and of as many steps after it, up to `end`, as fit into the cache.

        `batches(k)` are the prompts of step k.
        """
        if self.until is not None and step < self.until:
            return
        if self._room is None:  # the size of embeddings is known once the first prompts are encoded
            prompts = batches(step)
            log.info("encoding %d prompts", len(prompts))
            self._room = self._encode_steps([prompts])
        # decided by the step, not by the contents of a rank's cache: all ranks must encode at the same steps
        self.until = min(step + self._room, end)
        self._room = self._encode_steps([batches(k) for k in range(step, self.until)])

    def _encode_steps(self, prompts: list[list[Prompt]]) -> int:
        """Encode, and return the number of steps, at most ENCODE_AHEAD, that fit into the caches."""
        room = [encode(prompts) for encode in self.encoders]
        return max(1, min(ENCODE_AHEAD, *room))
