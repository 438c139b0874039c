"""A block-diffusion model's shapes without its weights, and its rollout: one pass over the last block is computed.

All prompts and responses have the greatest length, and for memory a response has the most states: one for each token,
as if each denoising step unmasked one.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from phalanx.config.lm import LMRunConfig
from phalanx.functional.block_diffusion import BlockTrace, States, Views, states_of
from phalanx.functional.tokens import TokenReplay
from phalanx.models.lm.blocks import BlockDiffusionLM, BlockDiffusionPolicy, check_layers
from phalanx.models.lm.model import CACHE, CausalLM
from phalanx.plan.layout import Cluster
from phalanx.plan.ledger import META, Ledger
from phalanx.plan.lm import PlannedLMPolicy, PlannedLMRollout, planned_lm_policy
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.denoise import Denoising, drawn_tokens, read
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout

PER_LOOK = 2.5  # tokens that a pass over a block unmasks by a threshold; an assumption, only for the time


class PlannedBlockLM(BlockDiffusionLM):
    """With `flex`, the dense mask is there only until that of the blocks is made of it."""

    flex = False

    def _mask_of(self, states: States) -> Any:
        mask = super()._mask_of(states)
        return torch.zeros(1, 1, 1, 1, dtype=self.lm.dtype, device=META) if self.flex else mask


class PlannedBlockPolicy(PlannedLMPolicy, BlockDiffusionPolicy):
    """See PlannedLMPolicy. `looks_of_a_response` is a number for the time that decoding takes."""

    looks_of_a_response = 0.0

    def scored(self, trace: BlockTrace, temperature: float) -> TokenReplay:  # type: ignore[override]
        """Run only the first of equal passes of a phase."""
        self.ledger.phase.passes += 1

        def run() -> Tensor:
            replay = BlockDiffusionPolicy.scored(self, trace, temperature)
            return torch.stack([replay.log_prob, replay.entropy, replay.self_certainty])

        rows, width = len(trace.ids), trace.width
        key = self.trained.module, torch.is_grad_enabled(), rows, trace.ids.shape[1], trace.states
        return TokenReplay(*self.ledger.once(key, run).view(3, rows, width))

    def seen(self, trace: BlockTrace) -> States:
        """States in which each token is predicted once, or twice of three; random masks cover all tokens."""
        views, asked = 3 if self.estimate == "coupled" else 1, 2 if self.estimate == "coupled" else 1
        if self.estimate in ("coupled", "elbo"):
            masked = (trace.steps >= 0)[:, :, None].expand(-1, -1, views, -1)
            states = states_of(trace.ids, Views(masked, masked.float()), mask_id=self.mask_id, count=trace.states)
        else:
            states = super().seen(trace)
        self.ledger.mark(states.weight, len(trace.ids) * trace.width * asked)
        return states

    def looks(self, trace: BlockTrace) -> Tensor:
        return torch.full((len(trace.ids),), self.looks_of_a_response)

    def states(self, trace: BlockTrace) -> Tensor:
        if self.estimate == "trace":
            return self.looks(trace)
        views = 3 if self.estimate == "coupled" else 1
        return torch.full((len(trace.ids),), views * trace.width // self.size)


class PlannedBlockRollout(PlannedLMRollout, BlockDiffusionRollout):
    """Samples of the greatest lengths, with `most` states each in a pass."""

    policy: PlannedBlockPolicy
    most = 0

    @property
    def denoising(self) -> Denoising:
        """How it decodes for training."""
        assert isinstance(self.how, Denoising), "as BlockDiffusionRollout makes it"
        return self.how

    @property
    def before(self) -> int:
        """Tokens of the longest prompt that fills its blocks: another one leaves a response less room."""
        size = self.policy.size
        return self.data.max_prompt_length // size * size

    @property
    def per_look(self) -> float:
        """Tokens that a pass over a block is assumed to unmask."""
        size, least = self.policy.size, self.policy.size / self.denoising.steps
        return least if self.denoising.threshold == 1 else min(max(PER_LOOK, least), size)

    def _longest(self, share: int) -> tuple[BlockTrace, int]:
        size, before, limit = self.policy.size, self.before, self.how.limit
        ids = torch.zeros(share, before + limit, dtype=torch.long, device=META)
        starts, lengths = torch.full((share,), before, device=META), torch.full((share,), limit, device=META)
        step, seeds = torch.zeros_like(ids[:, before:]), torch.zeros_like(starts)
        self.policy.looks_of_a_response = limit / self.per_look
        trace = BlockTrace(ids, starts, lengths, limit, step=step, seeds=seeds, states=self.most, size=size)
        return trace, before + limit + (self.most - 1) * size

    def _decoded(self, count: int, n: int, decoding: Decoding) -> None:
        """Read the prompts, and pass over the last block of `count` responses, n of each prompt."""
        assert isinstance(decoding, Denoising), "as BlockDiffusionRollout makes it"
        self.policy.ledger.phase.passes += 1
        forward, size, length = self.policy.trained.module, self.policy.size, self.before + decoding.limit
        cache, rows = DynamicCache(config=self.policy.settings), [i // n for i in range(count)]
        prompts = [[0] * self.before] * (rows[-1] + 1)
        read(forward, cache, prompts, rows, decoding, META)
        full = self._filled(cache, count, length)
        del cache
        full.crop(-size)
        state = torch.zeros(count, size, dtype=torch.long, device=META)
        seen = torch.ones(count, length, dtype=torch.bool, device=META)
        logits = forward(
            input_ids=state,
            attention_mask=seen[:, None, None].expand(-1, 1, size, -1),
            position_ids=state,
            **{CACHE: full},
            use_cache=True,
        ).logits
        full.crop(-size)
        drawn_tokens(logits, state == decoding.mask_id, torch.empty(count, size, device=META), decoding)


def planned_block_policy(
    cfg: LMRunConfig, cluster: Cluster, ledger: Ledger, *, rank: int = 0, chunk: int, estimate: str = "trace"
) -> PlannedBlockPolicy:
    """As phalanx.plan.lm.planned_lm_policy, of a model in blocks."""
    model = cfg.model
    assert model.block_size is not None, "the caller looks"
    size = model.block_size

    def make(module: CausalLM, *args: Any, **options: Any) -> PlannedBlockPolicy:
        check_layers(module.lm, model.path)
        blocks = PlannedBlockLM(module.lm, chunk, 0, recomputes=module.recomputes)
        blocks.flex = model.attn_implementation == "flex_attention"
        return PlannedBlockPolicy(blocks, *args, size=size, estimate=estimate, **options)

    policy = planned_lm_policy(cfg, cluster, ledger, rank=rank, chunk=chunk, make=make)
    assert isinstance(policy, PlannedBlockPolicy), "as made here"
    return policy
