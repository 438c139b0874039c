"""Sampling of a block-diffusion model in the very modules that are trained."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from phalanx.config.lm import LMDataConfig, LMRolloutConfig
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.distributed.seed import fold_in
from phalanx.functional.block_diffusion import BlockTrace
from phalanx.models.lm.blocks import BlockDiffusionPolicy
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.denoise import Denoising, denoise
from phalanx.rollout.lm.in_policy import Drawn, LMRollout
from phalanx.types import Prompt, Samples


class BlockDiffusionRollout(LMRollout):
    """See phalanx.types.Rollout. A response ends with the block in which an end token is drawn: what stands behind that
    is trained, as it was drawn, and is not part of the text.
    """

    policy: BlockDiffusionPolicy

    def __init__(
        self,
        policy: BlockDiffusionPolicy,
        config: LMRolloutConfig,
        data: LMDataConfig,
        world: World,
        micro_batch_size: int,
        passes: Passes | None,
    ) -> None:
        super().__init__(policy, config, data, world, micro_batch_size, passes)
        size, val = policy.size, config.val
        block: dict[str, Any] = {"size": size, "mask_id": policy.mask_id, "confidence": config.confidence}
        steps = config.denoising_steps_per_block or size
        self.how = Denoising(**asdict(self.how), **block, steps=steps, threshold=config.threshold)
        self.val_how = Denoising(
            **asdict(self.val_how),
            **block,
            steps=val.denoising_steps_per_block or steps,
            threshold=config.threshold if val.threshold is None else val.threshold,
        )

    def metrics(self, samples: Samples, reward: Tensor) -> dict[str, float]:
        """As of a language model, with rollout/tokens_per_forward: those that a look at a block unmasks."""
        tokens = sum(len(drawn.steps) for drawn in self._drawn)
        row = super().metrics(samples, reward)
        forwards = sum(self.forwards(drawn) for drawn in self._drawn)
        return row | {"rollout/tokens_per_forward": reduce_int(tokens, "sum") / reduce_int(forwards, "sum")}

    def forwards(self, drawn: Drawn) -> int:
        """Looks at the sample's blocks, without those that keep keys and values."""
        first = len(drawn.prompt) % self.policy.size
        return len({((first + i) // self.policy.size, step) for i, step in enumerate(drawn.steps)})

    def _decode(self, prompts: list[Prompt], names: Sequence[tuple[int, ...]], how: Decoding) -> list[Drawn]:
        assert isinstance(how, Denoising), "as __init__ makes it"
        tokens, rows = self._encoded(prompts)
        uniform = self._uniform(names, how.draws * how.limit, how).view(len(names), how.draws, how.limit)
        forward = self.policy.trained.module
        found = denoise(forward, self.policy.settings, tokens, rows, uniform, how)
        drawn = []
        for row, response in zip(rows, found, strict=True):
            end = next((i for i, token in enumerate(response.tokens) if token in how.ends), None)
            text = self.policy.decode(response.tokens[:end])
            drawn.append(Drawn(tokens[row], response.tokens, text, end is None, response.log_probs, response.steps))
        return drawn

    def _trace(self, ids: Tensor, starts: Tensor, lengths: Tensor, width: int) -> BlockTrace:
        step = torch.full((len(ids), width), -1)
        for i, drawn in enumerate(self._drawn):
            step[i, : len(drawn.steps)] = torch.tensor(drawn.steps)
        seeds = torch.tensor([fold_in(*drawn.prompt, *drawn.response) for drawn in self._drawn])
        trace = BlockTrace(
            ids, starts, lengths, step.to(ids.device), seeds.to(ids.device), width, states=0, size=self.policy.size
        )
        most = reduce_int(int(self.policy.states(trace).max()), "max")
        return replace(trace, states=most)

    def _positions(self, samples: Samples) -> Tensor:
        assert samples.lengths is not None, "samples of tokens have lengths"
        states: Tensor = self.policy.states(samples.trace).cpu()
        return samples.lengths.sum(1) + (states - 1) * self.policy.size
