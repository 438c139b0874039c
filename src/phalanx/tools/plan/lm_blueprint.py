"""The shapes of a language model, causal or in blocks, without its weights, and a rollout of few passes: over the
prompts, and over the last token or block.

All prompts and responses have their maximum lengths. For memory, a response in blocks has the most states: one for each
token, as if each denoising step unmasked one. Only the folder's configurations are read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache

from phalanx.config.lm import LMRunConfig
from phalanx.config.messages import counted
from phalanx.config.parallel import ParallelConfig
from phalanx.distributed.expert_parallel import Exchange
from phalanx.engines.loading import loading
from phalanx.functional.block_states import BlockTrace, States, Views, states_of
from phalanx.functional.token_budget import in_order
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.models.lm import experts
from phalanx.models.lm.blocks import BlockDiffusionLM, BlockDiffusionPolicy, check_layers
from phalanx.models.lm.composite import check_text, text_part
from phalanx.models.lm.kv_rows import Columns, KVRows
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.load_folder import causal_lm
from phalanx.models.lm.model import DTYPES, CausalLM
from phalanx.models.lm.packing import Row
from phalanx.models.stored import cast_weights
from phalanx.rollout.lm.decode import Decoding
from phalanx.rollout.lm.denoise_blocks import Denoising, drawn_tokens
from phalanx.rollout.lm.in_blocks import BlockDiffusionRollout
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.rollout.lm.partial import drawn_at_once
from phalanx.rollout.lm.session import Request
from phalanx.run.world import lone_world
from phalanx.tools.plan.layout import NOTHING, Cluster, CountedPolicy
from phalanx.tools.plan.ledger import META, Ledger
from phalanx.tools.plan.tables import Rows
from phalanx.tools.plan.vision_blueprint import PlannedVision, shows_images
from phalanx.types import Each, Prompt, Samples


class PlannedLMPolicy(CountedPolicy, LMPolicy):
    """A language model's policy on the meta device."""

    def make_reader(self) -> None:
        """None: no prompt is read."""

    def recompute(self, count: int) -> None:
        """Have the first `count` layers recomputed in backward passes."""
        module = self.trained.module
        module.eval()  # also those that were recomputed
        module.recomputes, self.trained.recomputed = count, count / len(self.blocks)

    def update_rows(self, p: Any, what: str = "tokens", drawn: str = "") -> Rows:
        """How responses of a planned job `p` are drawn and trained. what: what a pass is measured in."""
        plan, longest = p.plan, int(p.samples.tokens[0])
        if not drawn and p.cfg.rollout.facts.weights != "policy":
            drawn = f", in {p.cfg.rollout.engine}"
        inner = f"{counted(plan.first(1), 'response')} of {longest} {what}"
        if plan.budget is not None:
            inner = f"at most {plan.budget} {what}, {plan.budget // longest} of the longest responses"
        batches, flying = counted(p.state.micro_batches, "micro-batch"), Rows()
        if p.cfg.rollout.partial_rollout:
            r = p.cfg.rollout
            count = drawn_at_once(r, plan.samples // r.n) * r.n
            rounds = f"in rounds of {counted(r.partial_rollout.tokens, 'token')}"
            flying = [("in flight", f"{count} responses, {rounds}; those that wait have no keys and values")]
        return [
            ("rollout", f"{plan.rollout_micro} responses together{drawn}"),
            *flying,
            ("updates", f"{plan.updates * plan.epochs} per step, of {batches} in all"),
            ("micro-batch", f"{inner}{', in one row' if plan.packed else ''}"),
        ]

    def input_rows(self, p: Any) -> Rows:
        """The lengths of samples, and what their images take."""
        prompt, vision = p.cfg.data.max_prompt_length, self.vision
        rows = [("tokens", f"{prompt} + {self.tokens - prompt} at most")]
        if vision is not None:
            tower = "frozen, which reads each once" if vision.frozen else "trained, which reads it in each pass"
            rows.append(("images", f"1 image per prompt, {vision.look.count} of its tokens; the tower is {tower}"))
        return rows

    def scored(self, trace: TokenTrace, temperature: float) -> TokenReplay:
        """As LMPolicy.scored; only the first of equal passes of a phase runs."""
        rows, longest, width = *trace.ids.shape, trace.width
        self.ledger.phase.passes += 1
        key = self.trained.module, torch.is_grad_enabled(), rows, longest, width
        return TokenReplay(*self.ledger.once(key, lambda: self._replay_scores(trace, temperature)).view(3, rows, width))

    def _replay_scores(self, trace: Any, temperature: float) -> Tensor:
        rows, longest = trace.ids.shape
        predicting = torch.ones(rows, longest - 1, dtype=torch.bool, device=META)
        self.ledger.mark(predicting, rows * trace.width)
        row = Row.of(trace.ids, [longest] * rows) if self.config.use_remove_padding else None
        return torch.stack(self.trained.module(trace.ids, predicting, temperature, row, trace.looks))


@dataclass(frozen=True)
class PlannedExperts:
    """The experts of a `layer` on one of `ranks` ranks, in place of SpreadExperts: they receive as many tokens as the
    rank sends. Outside of updates, passes have all experts if these are `unsharded`; the layout counts their memory.
    """

    layer: nn.Module
    policy: PlannedLMPolicy
    ranks: int
    unsharded: bool

    @property
    def gathered(self) -> bool | None:
        """None if tokens travel, as in SpreadExperts."""
        return None if self.policy.ledger.phase.name == "update" or not self.unsharded else True

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that the layer computes with: the experts of this rank, or of all ranks."""
        parts, dtype = dict(self.layer.named_parameters(recurse=False)), self.policy.trained.dtype
        if self.gathered is None:
            return {name: p.to(dtype) for name, p in parts.items()}
        with self.policy.ledger.uncounted():
            return {name: p.new_empty(len(p) * self.ranks, *p.shape[1:], dtype=dtype) for name, p in parts.items()}

    def exchange(self, rows: Tensor, counts: Tensor) -> Exchange:
        """Send rows [N, D], and receive as many."""
        return Exchange(rows, counts.view(self.ranks, -1), [len(rows)], [len(rows)], None)


def keep_apart(policy: PlannedLMPolicy, parallel: ParallelConfig) -> None:
    """Have layers whose experts stay apart keep those of one rank, and exchange tokens."""
    module = policy.trained.module
    for w in policy.layout.weights:
        if not w.apart:
            continue
        owner, _, leaf = w.name.rpartition(".")
        layer = module.get_submodule(owner)
        part = nn.Parameter(torch.empty(w.part, dtype=w.kept, device=META).view(-1, *w.shape[1:]), w.trained)
        setattr(layer, leaf, part)
        if w.trained:
            policy.trained.parameters[w.name] = part
        layer.spread = PlannedExperts(layer, policy, w.width, parallel.rollout_unsharded)
        module.lm.config._experts_implementation = experts.SPREAD


class PlannedLMRollout(LMRollout):
    """The longest samples, decoded only if the policy's own modules do it."""

    policy: PlannedLMPolicy
    most = 0  # states of a sample in a pass, of block diffusion

    @contextmanager
    def awake(self) -> Iterator[None]:
        with torch.no_grad(), self.policy.unsharded() if self.facts.weights == "policy" else nullcontext():
            yield

    @property
    def before(self) -> int:
        """Tokens of the longest prompt."""
        return self.data.max_prompt_length

    def sample(self, prompts: list[Prompt], *, seed: int, step: int, each: Each) -> Samples:
        n, share = self.config.n, len(prompts) * self.config.n // self.world.data_size
        index = self.world.data_rank * share + torch.arange(share)
        trace, longest = self._longest_samples(share)
        if self.policy.vision is not None:
            rows = [i // n for i in index.tolist()]
            looks = self.policy.vision.looks(rows[-1] - rows[0] + 1)
            self.policy.vision.keep(looks)
            trace = replace(trace, looks=tuple(looks[row - rows[0]] for row in rows))
        drawn = -(-drawn_at_once(self.config, len(prompts)) * n // self.world.data_size)  # not only those trained
        together = min(self.micro_batch_size, -(-drawn // self.world.context_size))
        again = None if self.config.partial_rollout is None else self.config.partial_rollout.tokens
        self._decode_last(together, n, self.how, trace.looks, again)
        positions = torch.full((share,), longest)
        log_prob = torch.zeros(share, self.how.limit, device=META)
        if self.exact and self.passes is not None:
            with self.policy.ledger.during("rollout: log-probs"):
                parts = self.passes.parts(share, positions[:, None])
                log_prob = in_order([self.policy.replay(trace.select(part)).log_prob for part in parts], parts)
        lengths = torch.tensor([[self.before, self.how.limit, self.how.limit]]).repeat(share, 1)
        local_prompts = [prompts[i // n] for i in index.tolist()]
        on_policy = self.exact and self.passes is None
        beside: dict[str, Any] = {"lengths": lengths, "on_policy": on_policy, "positions": positions}
        return Samples(local_prompts, [], log_prob, trace.mask, trace, index, **beside)

    def sample_validation(self, prompts: list[Prompt], *, each: Each) -> None:
        val = self.config.val
        count = min(self.micro_batch_size, len(prompts) * val.n)
        looks = None if self.policy.vision is None else self.policy.vision.looks(count)
        self._decode_last(count, val.n, self.val_how, looks)

    def _longest_samples(self, share: int) -> tuple[Any, int]:
        """`share` of the longest samples, and the number of positions of each in a pass."""
        before, limit = self.before, self.how.limit
        ids = torch.zeros(share, before + limit, dtype=torch.long, device=META)
        starts, lengths = torch.full((share,), before, device=META), torch.full((share,), limit, device=META)
        return TokenTrace(ids, starts, lengths, limit), before + limit

    def _decode_last(
        self, count: int, n: int, decoding: Decoding, looks: Sequence[Any] | None, again: int | None = None
    ) -> None:
        """Read the prompts, and decode the last token of `count` responses, n of each. looks: see TokenTrace.

        again: instead, read all but the last `again` tokens of each response, which has begun in an earlier round.
        """
        if self.facts.weights != "policy":
            return
        self.policy.ledger.phase.passes += 1
        length = self.before + decoding.limit
        rows, read = (-(-count // n), self.before) if again is None else (count, max(length - again, self.before))
        shown = [None] * rows if looks is None else list(dict.fromkeys(looks))[:rows]
        prompts: list[Request] = []
        for look in shown:
            prompts.append(Request(prompt=[0] * read, name=(), decoding=decoding, room=decoding.limit, look=look))
        session: Any = self.session
        session._decoding = decoding
        cache, mask, (first, *_) = session._prefilled(prompts)
        if session._refills:
            session._kept = KVRows(self.policy.settings, count, length)
            session._kept.fill([], first.states)
        else:
            session._kept = Columns(self._filled_cache(cache, count, length - 1), mask, [0] * count)
        del cache, first
        self._draw_last(session, count, length)
        session.close_rows()

    def _draw_last(self, session: Any, count: int, length: int) -> None:
        inputs = torch.full((3, count, 1), length - 1, device=META)
        session._step(length, inputs, torch.empty(count, device=META))

    def _filled_cache(self, cache: DynamicCache, count: int, length: int) -> DynamicCache:
        """A cache like the given one, with the keys and values of `count` samples of `length` tokens."""
        full = DynamicCache(config=self.policy.settings)
        for number, layer in enumerate(cache.layers):
            shape = count, layer.keys.shape[1], length, layer.keys.shape[3]
            states = torch.empty(shape, dtype=layer.keys.dtype, device=META)
            full.update(states, torch.empty_like(states), number)
        return full


class PlannedBlockLM(BlockDiffusionLM):
    """With `flex`, the dense mask exists only until the block mask is made of it."""

    flex = False

    def _mask_of(self, states: States) -> Any:
        mask = super()._mask_of(states)
        return torch.zeros(1, 1, 1, 1, dtype=self.lm.dtype, device=META) if self.flex else mask


class PlannedBlockPolicy(PlannedLMPolicy, BlockDiffusionPolicy):
    """See PlannedLMPolicy. looks_of_a_response: passes that decode a response, at most."""

    looks_of_a_response = 0.0

    def update_rows(self, p: Any, what: str = "positions", drawn: str = "") -> Rows:
        drawn = f", at least {p.rollout.per_look:.3g} of a block's tokens per denoising step"
        return super().update_rows(p, what, drawn)

    def input_rows(self, p: Any) -> Rows:
        rows = super().input_rows(p)
        if p.plan is None:
            return rows
        size, most = self.size, p.rollout.most
        clean = int(p.samples.tokens[0]) - most * size
        return [*rows, ("states", f"{most} of {size} tokens behind {clean} of a sample at most")]

    def _replay_scores(self, trace: Any, temperature: float) -> Tensor:
        replay = BlockDiffusionPolicy.scored(self, trace, temperature)
        return torch.stack([replay.log_prob, replay.entropy, replay.self_certainty])

    def seen(self, trace: BlockTrace) -> States:
        """States in which each token is predicted once, or in two of three; random masks cover all tokens."""
        views, predicted = (3, 2) if self.estimate == "coupled" else (1, 1)
        if self.estimate in ("coupled", "elbo"):
            masked = (trace.steps >= 0)[:, :, None].expand(-1, -1, views, -1)
            states = states_of(trace.ids, Views(masked, masked.float()), mask_id=self.mask_id, count=trace.states)
        else:
            states = super().seen(trace)
        self.ledger.mark(states.weight, len(trace.ids) * trace.width * predicted)
        return states

    def looks(self, trace: BlockTrace) -> Tensor:
        return torch.full((len(trace.ids),), self.looks_of_a_response)

    def states(self, trace: BlockTrace) -> Tensor:
        if self.estimate == "trace":
            return self.looks(trace)
        views = 3 if self.estimate == "coupled" else 1
        return torch.full((len(trace.ids),), views * trace.width // self.size)


class PlannedBlockRollout(PlannedLMRollout, BlockDiffusionRollout):
    """The longest samples, with `most` states each in a pass."""

    policy: PlannedBlockPolicy

    @property
    def before(self) -> int:
        """Tokens of the longest prompt that fills its blocks; any other leaves less room for a response."""
        size = self.policy.size
        return self.data.max_prompt_length // size * size

    @property
    def per_look(self) -> float:
        """Tokens that a pass over a block unmasks; a threshold may unmask more."""
        return self.policy.size / cast(Denoising, self.how).steps

    def _longest_samples(self, share: int) -> tuple[BlockTrace, int]:
        (plain, length), size, limit = super()._longest_samples(share), self.policy.size, self.how.limit
        step, seeds = torch.zeros_like(plain.ids[:, self.before :]), torch.zeros_like(plain.starts)
        self.policy.looks_of_a_response = limit / self.per_look
        beside: dict[str, Any] = {"step": step, "seeds": seeds, "states": self.most, "size": size}
        trace = BlockTrace(plain.ids, plain.starts, plain.lengths, limit, **beside)
        return trace, length + (self.most - 1) * size

    def _draw_last(self, session: Any, count: int, length: int) -> None:
        """A pass over the last block, of which no token is known."""
        decoding, size = session._decoding, self.policy.size
        state = torch.zeros(count, size, dtype=torch.long, device=META)
        given = session._kept.arguments(state, length, torch.ones(count, size, length, dtype=torch.bool, device=META))
        forward = self.policy.trained.module
        logits = forward(input_ids=state, position_ids=state, **given, use_cache=True).logits
        drawn_tokens(logits, state == decoding.mask_id, torch.empty(count, size, device=META), decoding)


class _Tokenizer:
    """In place of a tokenizer: no text is read or written."""

    pad_token_id = eos_token_id = 0

    def __len__(self) -> int:
        return 1


def planned_lm_policy(
    cfg: LMRunConfig,
    cluster: Cluster,
    ledger: Ledger,
    *,
    rank: int = 0,
    chunk: int = 1024,
    tries: bool = False,
    **options: Any,
) -> PlannedLMPolicy:
    """The policy as training builds it, on the meta device, of one rank that has all weights; its layout is that of a
    rank of the cluster. Options and errors are those of build_policy, or of build_block_policy. `cfg.model.path` is a
    local folder.
    """
    model, frozen = cfg.model, options.get("frozen", False)
    kept = DTYPES[model.dtype] if model.lora_rank > 0 or frozen else torch.float32
    # kernels that are not installed take as much memory as torch's own; none of these changes what is kept
    attention = "eager" if model.attn_implementation == "eager" else "sdpa"
    config = replace(model, attn_implementation=attention, compile=False, lora_init="gaussian")
    world = lone_world(cfg.parallel, cluster.ranks, rank, META)
    with loading(f"model.path: {model.path!r} does not load"):
        settings = transformers.AutoConfig.from_pretrained(model.path, trust_remote_code=False)
        images, kind = shows_images(cfg, settings), transformers.AutoModelForImageTextToText
        text = None if images else text_part(settings)
        if text is not None:
            check_text(settings, text)
    if not images:
        settings, kind = text or settings, transformers.AutoModelForCausalLM
    with META:
        lm = kind.from_config(settings, dtype=kept, trust_remote_code=False)
        cast_weights(lm, kept)
        module: CausalLM = causal_lm(lm, config, chunk, images=images, tries=tries)
        if images:
            module.vision = PlannedVision(lm, config)
        lm.config._experts_implementation = experts.SHAPES
        blocks = module.blocks()
        make: type[PlannedLMPolicy] = PlannedLMPolicy
        options |= {"temperature": cfg.rollout.temperature, "seed": cfg.trainer.seed}
        if model.block_size is not None:
            check_layers(module.lm, model.path)
            module = PlannedBlockLM(module.lm, chunk, 0, recomputes=module.recomputes)
            module.flex = model.attn_implementation == "flex_attention"
            make, options = PlannedBlockPolicy, {"estimate": "trace", "size": model.block_size, **options}
        policy = make(module, _Tokenizer(), world, config, cfg.parallel, cfg.data, **options)
    policy.lay_out(cfg, cluster, ledger, blocks, module.vision.beside() if images else NOTHING)
    if images:
        with ledger, ledger.uncounted():
            module.vision.begin(model.path, cfg.data)
    keep_apart(policy, cfg.parallel)
    policy.tokens = cfg.data.max_prompt_length + cfg.data.max_response_length
    return policy
