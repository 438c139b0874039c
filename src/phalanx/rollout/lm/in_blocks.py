"""Sampling from a block-diffusion model with the trained modules themselves."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from phalanx.config.engine_facts import EngineFacts
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.seed import fold_in
from phalanx.functional.aggregation import Mean
from phalanx.functional.block_states import BlockTrace
from phalanx.models.lm.blocks import BlockDiffusionPolicy
from phalanx.models.lm.joined_steps import decoding_forward
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.denoise_blocks import BlockSession, Denoising
from phalanx.rollout.lm.in_policy import Drawn, LMRollout
from phalanx.rollout.lm.session import Request, Session
from phalanx.types import Samples


class BlockDiffusionRollout(LMRollout):
    """See phalanx.types.Rollout. A response ends with the block that contains the first end token. The tokens after the
    end token are trained, because they were drawn, but are not part of the text.
    """

    facts = EngineFacts(blocks=True)
    policy: BlockDiffusionPolicy

    def _settings(self) -> tuple[Decoding, Decoding]:
        config, val, size = self.config, self.config.val, self.policy.size
        block: dict[str, Any] = {"size": size, "mask_id": self.policy.mask_id, "confidence": config.confidence}
        block |= {"steps": config.denoising_steps_per_block or size, "threshold": config.threshold}
        of_val = dict(block)
        if val.denoising_steps_per_block is not None:
            of_val["steps"] = val.denoising_steps_per_block
        if val.threshold is not None:
            of_val["threshold"] = val.threshold
        plain, plain_val = super()._settings()
        return Denoising(**vars(plain), **block), Denoising(**vars(plain_val), **of_val)

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """Metrics of LMRollout, and rollout/tokens_per_forward, the tokens unmasked per denoising step of a block."""
        tokens = sum(len(drawn.steps) for drawn in self.drawn)
        row = super().metrics(samples, reward)
        forwards = reduce_int(sum(self.forwards(drawn) for drawn in self.drawn), "sum")
        return row | {"rollout/tokens_per_forward": Mean(reduce_int(tokens, "sum") / forwards, forwards)}

    def forwards(self, drawn: Drawn) -> int:
        """The number of denoising steps of the sample's blocks, without the passes that store keys and values."""
        first = len(drawn.prompt) % self.policy.size
        return len({((first + i) // self.policy.size, step) for i, step in enumerate(drawn.steps)})

    @cached_property
    def session(self) -> Session:
        """See LMRollout."""
        forward, settings = decoding_forward(self.policy.trained), self.policy.settings
        return BlockSession(forward, settings, self.world.device, self.micro_batch_size)

    def request(
        self, prompt: list[int], name: tuple[Any, ...], decoding: Decoding, *earlier: Sequence[Any], **options: Any
    ) -> Request:
        """See LMRollout: up to a whole number of blocks."""
        size = self.policy.size
        room = decoding.limit // size * size - len(prompt) % size
        return super().request(prompt, name, decoding, *earlier, **{"room": room} | options)

    def drawn_sample(self, request: Request) -> Drawn:
        """See LMRollout."""
        drawn = super().drawn_sample(request)
        return replace(drawn, log_probs=request.log_probs, steps=request.steps, behind=request.behind)

    def text(self, request: Request) -> str:
        """The text before the end token, or with its stop text."""
        tokens = request.tokens[: len(request.tokens) - request.behind]
        ends = tokens[-1:] and tokens[-1] in request.decoding.ends
        return self.policy.decode(tokens[:-1] if ends else tokens)

    def _trace(self, ids: Tensor, starts: Tensor, lengths: Tensor, width: int) -> BlockTrace:
        step = torch.full((len(ids), width), -1)
        for i, drawn in enumerate(self.drawn):
            step[i, : len(drawn.steps)] = torch.tensor(drawn.steps)
        seeds = torch.tensor([fold_in(*drawn.prompt, *drawn.response) for drawn in self.drawn])
        step, seeds = step.to(ids.device), seeds.to(ids.device)
        trace = BlockTrace(ids, starts, lengths, width, step=step, seeds=seeds, states=0, size=self.policy.size)
        most = reduce_int(int(self.policy.states(trace).max()), "max")
        return replace(trace, states=most)

    def _positions(self, samples: Samples) -> Tensor:
        assert samples.tokens is not None, "samples of tokens have lengths"
        states: Tensor = self.policy.states(samples.trace).cpu()
        return samples.tokens + (states - 1) * self.policy.size
