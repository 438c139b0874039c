"""Block-diffusion models from the modules of causal language models."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx.config.lm import LMDataConfig
from phalanx.config.messages import cut
from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import LMModelConfig
from phalanx.distributed.mesh import World
from phalanx.functional.block_states import BlockTrace, States, of_responses, replayed, states_of
from phalanx.functional.tokens import TokenReplay, token_scores
from phalanx.models.lm.flex import block_mask
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.load_folder import load_model, load_tokenizer
from phalanx.models.lm.model import DTYPES, CausalLM, decoder_of, other_layers, set_checkpointing
from phalanx.models.lm.packing import Share
from phalanx.types import Prompt, Samples

log = logging.getLogger(__name__)

MASK = "<|mask|>"  # the mask token that is added to tokenizers without one


class BlockDiffusionLM(CausalLM):
    """A language model that denoises blocks: its forward scores the tokens of many states at once."""

    def __init__(self, lm: Any, chunk: int, mask_id: int, *, recomputes: int = 0) -> None:
        super().__init__(lm, chunk, recomputes=recomputes)
        self.mask_id = mask_id

    def forward(  # type: ignore[override]
        self, states: States | None = None, temperature: float = 1.0, *, right: bool = False, **decoding: Any
    ) -> Any:
        """Scores [N] of the states' tokens with weight != 0: see token_scores. The mask token has probability 0.

        With `right`, log-probability, entropy, and [N] 1 where the token is the most likely one. Without `states`,
        the language model's own forward, with a bool attention_mask [B, 1, Q, K].
        """
        if self.recomputes:
            set_checkpointing(self, states is not None and torch.is_grad_enabled())
        if states is None:
            return self.decoded(**decoding)
        scored = states.weight != 0
        rows, _, _ = scored.nonzero(as_tuple=True)
        at, targets, share = states.at[scored], states.target[scored], None
        if self.context is None:
            given = {"position_ids": states.positions, "attention_mask": self._mask_of(states)}
            output = decoder_of(self.lm)(input_ids=states.tokens, **given, use_cache=False)
            hidden = output.last_hidden_state[rows, at]
        else:
            share = Share.cut(self.context, states.tokens, states.positions, rows, at, mask=states.allowed())
            output = decoder_of(self.lm)(input_ids=share.ids, use_cache=False, **share.arguments())
            hidden, targets = output.last_hidden_state.flatten(0, 1)[share.at], targets[share.local]
        head = self.head(output)
        options: dict[str, Any] = {"temperature": temperature, "chunk": self.chunk, "never": [self.mask_id]}
        scores: tuple[Tensor, ...] = token_scores(hidden, head, targets, fused=self.fused, **options)
        if right:
            scores = *scores[:2], (self._likeliest_tokens(hidden, head) == targets).float()
        return scores if share is None else share.whole(scores)

    @torch.no_grad()
    def _likeliest_tokens(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """The most likely tokens [N] of hidden states [N, H]."""
        tokens = [torch.zeros(0, dtype=torch.long, device=hidden.device)]
        for part in hidden.split(self.chunk):
            logits = head(part)
            logits[:, self.mask_id] = float("-inf")
            tokens.append(logits.argmax(-1))
        return torch.cat(tokens)

    def _mask_of(self, states: States) -> Any:
        """The states' attention mask, in the form that the model's attention implementation takes."""
        if self.lm.config._attn_implementation != "flex_attention":
            return self.attention_mask(states.allowed())
        return block_mask(states)


class BlockDiffusionPolicy(LMPolicy):
    """See phalanx.types.Policy. An action is a token of a response, in the state in which it was unmasked."""

    trace_type = BlockTrace

    def __init__(self, model: BlockDiffusionLM, *args: Any, size: int, estimate: str, **options: Any) -> None:
        """`estimate`: see phalanx.functional.block_states.replayed."""
        super().__init__(model, *args, **options)
        self.size, self.estimate, self.mask_id = size, estimate, model.mask_id

    def check_agreement(self, *, decodes: bool) -> None:
        """Do nothing: blocks are sampled and scored by the same passes."""

    def encode(self, prompt: Prompt) -> list[int]:
        """As in LMPolicy, but also raises ValueError for a prompt that contains the mask token."""
        tokens = super().encode(prompt)
        if self.mask_id in tokens:
            raise ValueError(
                f"data: the prompt {cut(prompt.text)!r} contains the mask token {self.tokenizer.mask_token!r}, which "
                "stands for tokens that are to be generated; remove it"
            )
        return tokens

    def scored(self, trace: BlockTrace, temperature: float) -> TokenReplay:  # type: ignore[override]
        """Score the tokens in all states of the samples, in one forward pass."""
        if self.trim:
            trace = trace.trimmed()
        states = self.seen(trace)
        log_prob, entropy, certainty = self.trained.run(self.trained.module, states, temperature)
        weight = of_responses(trace, states, torch.ones_like(entropy)).clamp(min=1)
        return TokenReplay(
            of_responses(trace, states, log_prob),
            of_responses(trace, states, entropy) / weight,
            of_responses(trace, states, certainty) / weight,
        )

    def seen(self, trace: BlockTrace) -> States:
        """The states that one forward pass over the samples reads."""
        views = replayed(trace, self.estimate)
        count = int(views.count.max()) if self.trim else trace.states
        states = states_of(trace.ids, views, mask_id=self.mask_id, count=count)
        return states.closed(trace.starts + trace.lengths - self.size) if self.trim else states

    def states(self, trace: BlockTrace) -> Tensor:
        """Number [B] of states of each sample that a replay evaluates."""
        return replayed(trace, self.estimate).count

    def looks(self, trace: BlockTrace) -> Tensor:
        """Number [B] of states of each sample that the rollout evaluated."""
        return replayed(trace).count

    def sample_flops(self, samples: Samples) -> list[float]:
        """FLOPs of a forward pass over each sample with all of its states, with the logits of its response."""
        assert samples.lengths is not None, "samples of this policy have lengths"
        lengths, states = samples.lengths.tolist(), self.states(samples.trace).tolist()
        return [self.states_flops(p + r, n, r) for (p, r, _), n in zip(lengths, states, strict=True)]

    def decode_flops(self, samples: Samples) -> list[float]:
        """FLOPs of decoding each sample, including its prompt: each state computes the logits of a whole block."""
        assert samples.lengths is not None, "samples of this policy have lengths"
        lengths, looks = samples.lengths.tolist(), self.looks(samples.trace).tolist()
        return [self.states_flops(p + r, n, n * self.size) for (p, r, _), n in zip(lengths, looks, strict=True)]

    def states_flops(self, length: int, states: float, logits: float) -> float:
        """FLOPs of a forward pass over `length` clean tokens and `states` states of them, with `logits` logits."""
        # a token of a state attends to about as many tokens as a clean one: those before its block
        return self.forward_flops(length, 0) * (1 + states * self.size / length) + self.forward_flops(0, logits)


def mask_tokenizer(config: LMModelConfig, *, add_mask: bool) -> Any:
    """The tokenizer of a model folder, with a mask token; raises ValueError, in one line, if there is none.

    The mask token is its own, or that of model.mask_token, or with `add_mask` a new one.
    """
    tokenizer = load_tokenizer(config)
    if config.mask_token is not None:
        if config.mask_token not in tokenizer.get_vocab():
            raise ValueError(f"model.mask_token: {config.mask_token!r} is not a token of {config.path!r}")
        tokenizer.mask_token = config.mask_token
    if tokenizer.mask_token_id is None:
        if not add_mask:
            raise ValueError(
                f"model.path: {config.path!r}: its tokenizer has no mask token, as block-diffusion models have; name "
                "it by model.mask_token, or train the model by tasks/train_block_diffusion.py first, which adds one"
            )
        tokenizer.add_special_tokens({"mask_token": MASK})
    return tokenizer


def adds_mask(config: LMModelConfig) -> bool:
    """Whether supervised training adds a new mask token to the tokenizer of a model folder."""
    return mask_tokenizer(config, add_mask=True).mask_token not in load_tokenizer(config).get_vocab()


def load_blocks(
    config: LMModelConfig, dtype: torch.dtype, chunk: int, *, add_mask: bool, stored: bool = False
) -> tuple[BlockDiffusionLM, Any]:
    """Load the model of a folder, and its tokenizer; see load_model and mask_tokenizer.

    The embedding of a new mask token is the mean of all others. Raises ValueError, in one line, for models that do not
    support block diffusion.
    """
    # the mean of the embeddings must be computed in the dtype in which they are kept
    stored = stored and not adds_mask(config)
    model, tokenizer = load_model(config, dtype, chunk, stored=stored), mask_tokenizer(config, add_mask=add_mask)
    lm, mask_id = model.lm, tokenizer.mask_token_id
    if model.places:
        raise ValueError(f"model.block_size: {config.path!r} is a composite model; expected a plain language model")
    check_layers(lm, config.path)
    rows = lm.get_input_embeddings().num_embeddings
    if mask_id >= rows + 1:
        raise ValueError(f"model.path: {config.path!r}: mask token {mask_id} is beyond its {rows} embeddings")
    if adds_mask(config):
        log.info("the tokenizer of %s has no mask token: it gets %s", config.path, MASK)
        _embed_mask(lm, mask_id)
    return BlockDiffusionLM(lm, chunk, mask_id, recomputes=model.recomputes), tokenizer


def check_layers(lm: Any, path: str) -> None:
    """Raise ValueError, in one line, for a model whose layers do not support block diffusion."""
    other = other_layers(lm)
    if other:
        raise ValueError(
            f"model.block_size: {path!r} has layers of other kinds ({other[0]}) than attention "
            "to all that was before; blocks cannot be denoised with it"
        )


@torch.no_grad()
def _embed_mask(lm: Any, mask_id: int) -> None:
    if mask_id == lm.get_input_embeddings().num_embeddings:
        lm.resize_token_embeddings(mask_id + 1, mean_resizing=False)
    for layer in {lm.get_input_embeddings(), lm.get_output_embeddings()}:
        layer.weight[mask_id] = layer.weight[:mask_id].float().mean(0).to(layer.weight.dtype)


def build_block_policy(
    config: LMModelConfig,
    parallel: ParallelConfig,
    data: LMDataConfig,
    world: World,
    *,
    chunk: int,
    estimate: str = "trace",
    add_mask: bool = False,
    frozen: bool = False,
    **options: Any,
) -> BlockDiffusionPolicy:
    """As phalanx.models.lm.lm_policy.build_policy, for a block-diffusion model; see load_blocks."""
    assert config.block_size is not None, "checked by the caller"
    dtype = DTYPES[config.dtype] if config.lora_rank > 0 or frozen else torch.float32
    stored = config.lora_rank == 0
    model, tokenizer = load_blocks(config, dtype, chunk, add_mask=add_mask, stored=stored)
    options |= {"size": config.block_size, "estimate": estimate, "frozen": frozen, "kept": dtype if stored else None}
    return BlockDiffusionPolicy(model, tokenizer, world, config, parallel, data, **options)
