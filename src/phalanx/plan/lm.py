"""A language model's shapes without its weights, and its rollout, of which the first and the last token are computed.

All prompts and responses are as long as they may be. Only the folder's configurations are read.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from phalanx.config.lm import LMRLConfig
from phalanx.distributed.mesh import World
from phalanx.engines.loading import loading
from phalanx.functional.token_budget import in_order
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.models.lm import experts
from phalanx.models.lm.model import DTYPES, CausalLM, causal_lm
from phalanx.models.lm.policy import LMPolicy
from phalanx.plan.layout import Cluster, Layout
from phalanx.plan.ledger import META, Ledger
from phalanx.rollout.lm.decode import draw
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.types import Each, Prompt, Samples

FILES = ("config.json", "generation_config.json")


class PlannedLMPolicy(LMPolicy):
    """A policy whose ledger hears what FSDP would do, and a copy of the weights make."""

    ledger: Ledger
    layout: Layout

    def unsharded(self) -> AbstractContextManager[None]:
        self.ledger.phase.rounds += 1
        return super().unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Without the copies, which are of a rank's part."""
        if self.trained.is_base(weights):
            return super().using(weights)
        self.ledger.phase.aside = True
        return nullcontext()

    def scored(self, trace: TokenTrace, temperature: float) -> TokenReplay:
        """Of equal passes of a phase only the first one runs."""
        (rows, longest), width = trace.ids.shape, trace.width
        lengths = [longest] * rows if self.config.use_remove_padding else None
        self.ledger.phase.passes += 1

        def run() -> Tensor:
            predicting = self.ledger.mask((rows, longest - 1), rows * width)
            return torch.stack(self.trained.module(trace.ids, predicting, temperature, lengths))

        key = self.trained.module, torch.is_grad_enabled(), rows, longest, width
        return TokenReplay(*self.ledger.once(key, run).view(3, rows, width))


class PlannedLMRollout(LMRollout):
    """Samples of the greatest lengths; with vLLM, of which the engine has a share, those alone."""

    policy: PlannedLMPolicy

    @contextmanager
    def awake(self) -> Iterator[None]:
        with torch.no_grad(), self.policy.unsharded() if self.exact else nullcontext():
            yield

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        n, share = self.config.n, len(prompts) * self.config.n // self.world.size
        index = torch.arange(self.world.rank * share, (self.world.rank + 1) * share)
        before, limit = self.data.max_prompt_length, self.how.limit
        self._decoded(min(self.micro_batch_size, share), n, limit)
        ids = torch.zeros(share, before + limit, dtype=torch.long, device=META)
        sizes = [torch.full((share,), size, device=META) for size in (before, limit)]
        trace = TokenTrace(ids, sizes[0], sizes[1], limit)
        log_prob = torch.zeros(share, limit, device=META)
        if self.exact and self.passes is not None:
            with self.policy.ledger.during("rollout: log-probs"):
                parts = self.passes.parts(share, torch.full((share, 1), before + limit))
                log_prob = in_order([self.policy.replay(trace.select(part)).log_prob for part in parts], parts)
        lengths = torch.tensor([[before, limit]]).repeat(share, 1)
        mine = [prompts[i // n] for i in index.tolist()]
        on_policy = self.exact and self.passes is None
        return Samples(mine, [], log_prob, trace.mask, trace, index, lengths=lengths, on_policy=on_policy)

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        val = self.config.val
        self._decoded(min(self.micro_batch_size, len(prompts) * val.n), val.n, self.val_how.limit)

    def _decoded(self, count: int, n: int, limit: int) -> None:
        """What reading prompts takes, and the last token of `count` responses, n of each prompt."""
        if not self.exact:
            return
        self.policy.ledger.phase.passes += 1
        forward, before = self.policy.trained.module, self.data.max_prompt_length
        ids = torch.zeros(-(-count // n), before, dtype=torch.long, device=META)
        cache = DynamicCache(config=self.policy.settings)
        forward(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        full = DynamicCache(config=self.policy.settings)
        for number, layer in enumerate(cache.layers):
            shape = count, layer.keys.shape[1], before + limit - 1, layer.keys.shape[3]
            states = torch.empty(shape, dtype=layer.keys.dtype, device=META)
            full.update(states, torch.empty_like(states), number)
        del cache, states
        at = torch.full((count, 1), before + limit - 1, device=META)
        out = forward(input_ids=ids[:1, :1].expand(count, 1), position_ids=at, past_key_values=full, use_cache=True)
        draw(out.logits[:, -1].float(), torch.empty(count, device=META), self.how)


class _Tokenizer:
    """Nothing is read or written as text."""

    pad_token_id = eos_token_id = 0

    def __len__(self) -> int:
        return 1

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [0]}


def planned_lm_policy(cfg: LMRLConfig, cluster: Cluster, ledger: Ledger, *, rank: int = 0) -> PlannedLMPolicy:
    """The policy as training builds it, on the meta device, of one rank that holds all weights. Raises as build_policy.

    `cfg.model.path` is a local folder. `layout` says what would be on a rank of the cluster.
    """
    model, kept = cfg.model, torch.float32 if cfg.model.lora_rank == 0 else DTYPES[cfg.model.dtype]
    # kernels that are not here take as much memory as torch's own; and none of these changes what is kept
    attention = "eager" if model.attn_implementation == "eager" else "sdpa"
    config = replace(model, attn_implementation=attention, compile=False, lora_init="gaussian")
    world = cast(World, SimpleNamespace(rank=rank, size=cluster.ranks, shard_size=1, device=META, watch=None))
    with loading(f"model.path: {model.path!r} does not load"):
        settings = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=False)
    with META:
        lm = transformers.AutoModelForCausalLM.from_config(settings, dtype=kept, trust_remote_code=False)
        module: CausalLM = causal_lm(lm, config, cfg.actor.log_prob_chunk_size)
        lm.config._experts_implementation = experts.SHAPES
        policy = PlannedLMPolicy(
            module,
            _Tokenizer(),
            world,
            config,
            cfg.parallel,
            cfg.data,
            temperature=cfg.rollout.temperature,
            seed=cfg.trainer.seed,
        )
    policy.trained.config = model  # PiSSA's reference is a copy
    policy.ledger, policy.layout = ledger, Layout.of(policy.trained, module.blocks(), cfg.parallel, cluster)
    return policy
