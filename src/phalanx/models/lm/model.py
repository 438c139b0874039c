"""Causal language models of transformers, and their tokenizers."""

import copy
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from phalanx.distributed.context_parallel import KEY, ContextGroup
from phalanx.distributed.mesh import World
from phalanx.functional.tokens import Truncation, sampled_from, token_scores
from phalanx.models.lm import llada2, packing

log = logging.getLogger(__name__)

llada2.register()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CausalLM(nn.Module):
    """A language model whose forward returns scores of tokens, so that training never has the logits of a whole batch.

    With gradients, the first `recomputes` blocks are recomputed in the backward pass.

    Scoring and decoding both call this module, which is FSDP's root; a call of `lm` would make `lm` a second root.
    """

    def __init__(self, lm: Any, chunk: int, *, recomputes: int = 0) -> None:
        super().__init__()
        self.lm, self.chunk, self.recomputes = lm, chunk, recomputes
        self.places: dict[str, str] = {}  # names in the composite model that it was loaded from; see places_of
        self.vision: Any = None  # a phalanx.models.lm.vision.Vision, if prompts may have images
        self.context: ContextGroup | None = None  # the ranks that share the positions of each pass
        self.packs = self.groups = False  # whether samples are packed, and their prompts computed once
        self.fused = False  # whether scores are computed by kernels of torch.compile
        self.tries = False  # whether it goes without where it cannot, instead of an error
        self.masks = not other_layers(lm)  # whether a pass may get its finished mask, as those of KVRows do

    def forward(
        self,
        ids: Tensor | None = None,
        predicting: Tensor | None = None,
        temperature: float = 1.0,
        row: packing.Row | None = None,
        looks: Sequence[Any] | None = None,
        truncation: Truncation | None = None,
        pool: tuple[Tensor, Tensor] | None = None,
        **decoding: Any,
    ) -> Any:
        """Scores [N] of the tokens that follow the positions `predicting` [B, T - 1] of ids [B, T]: see token_scores.

        row: the layout of all samples in one row without padding. pool: the tokens that truncated distributions keep,
        returned after the scores; it is computed by `truncation` if only that is given. looks: see TokenTrace. Without
        `ids` and `predicting`, the keywords in `decoding` go to the language model's own forward.
        """
        if self.recomputes:
            set_checkpointing(self, predicting is not None and torch.is_grad_enabled())
        if ids is None or predicting is None:
            if looks is not None:
                decoding |= self.vision.inputs(decoding.pop("input_ids"), looks)
            return self.decoded(**decoding)
        output, share = outputs_at(self, decoder_of(self.lm), ids, predicting, row, looks)
        tokens, head = ids[:, 1:][predicting], self.head(output)
        tokens = tokens if share is None else tokens[share.local]
        hidden = output.last_hidden_state
        options: dict[str, Any] = {"temperature": temperature, "chunk": self.chunk, "never": self.never}
        local = pool if pool is None or share is None else share.part_of_pool(*pool)
        if truncation is not None and local is None:
            local = sampled_from(hidden, head, tokens, truncation, **options)
            pool = local if share is None else share.whole_pool(*local)
        scores: tuple[Tensor, ...] = token_scores(hidden, head, tokens, pool=local, fused=self.fused, **options)
        if share is not None:
            scores = share.whole(scores)
        return scores if pool is None else (*scores, *pool)

    def decoded(self, **given: Any) -> Any:
        """The language model's own forward; an attention_mask [B, 1, Q, K] is bool."""
        config, mask = self.lm.config.get_text_config(decoder=True), given.get("attention_mask")
        if mask is None or mask.dim() < 4:
            return self.lm(**given)
        kind = config._attn_implementation
        if kind.startswith("fl"):  # flash-attention takes no such mask, and FlexAttention compiles for each shape
            config._attn_implementation = "sdpa"
        try:
            return self.lm(**given | {"attention_mask": self.attention_mask(mask)})
        finally:
            config._attn_implementation = kind

    def attention_mask(self, allowed: Tensor) -> Tensor:
        """The mask `allowed`, bool, in the form that the attention takes: eager attention adds it to the scores."""
        if self.lm.config.get_text_config(decoder=True)._attn_implementation not in ("eager", packing.SHARED_EAGER):
            return allowed
        dtype = self.lm.dtype
        return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(
            ~allowed, torch.finfo(dtype).min
        )

    @property
    def never(self) -> tuple[int, ...]:
        """Tokens excluded from the distributions: the placeholders of images."""
        return () if self.vision is None else self.vision.never

    def share_positions(self, world: World, name: str) -> None:
        """Under context parallelism, spread each pass's positions over ranks; `name` is model.attn_implementation.

        Raises ValueError for a model that does not support this.
        """
        if world.context is not None:
            self.context = context = ContextGroup.of(world.context)
            given, advice = f"{KEY}: {context.size}", "set it to 1"
            decoder = self.lm if self.vision is None else self.vision.packing(given, advice)
            packing.spread(decoder, context, name)

    def head(self, output: Any) -> Callable[[Tensor], Tensor]:
        """The map of states [N, H] to logits [N, V] of the language model's forward, with its scaling or capping.

        output: the output of its decoder, or of the whole model below the head if prompts have images.
        """

        def logits(states: Tensor) -> Tensor:
            given = copy.copy(output)
            given.last_hidden_state = states[None]
            decoder = decoder_of(self.lm) if self.vision is None else self.lm.model
            # the class's own forward runs, with these states instead of those that the decoder would compute
            decoder.forward = lambda *args, **kwargs: given
            try:
                result: Tensor = self.lm(inputs_embeds=given.last_hidden_state, use_cache=False).logits[0]
            finally:
                del decoder.forward
            return result

        return logits

    def blocks(self) -> list[nn.Module]:
        """The layers, which are sharded one by one."""
        return layers_of(decoder_of(self.lm))


def layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The layers of a decoder; their name depends on the class."""
    return list(next(child for child in decoder.children() if isinstance(child, nn.ModuleList)))


def set_checkpointing(model: Any, on: bool) -> None:
    """Switch gradient checkpointing of the layers on or off by their training mode, as transformers does.

    model: a CausalLM or a ValueLM, whose other modules stay in evaluation mode.
    """
    blocks = model.blocks()[: model.recomputes]
    if model.vision is not None and not model.vision.frozen:
        blocks += model.vision.blocks()
    for block in blocks:
        block.training = on


def outputs_at(
    model: Any, decoder: Any, ids: Tensor, predicting: Tensor, row: packing.Row | None, looks: Sequence[Any] | None
) -> tuple[Any, packing.Share | None]:
    """The decoder's output, with last_hidden_state [N, H] only at the positions `predicting` [B, T - 1] of ids [B, T].

    If ranks share positions, only at this rank's, and the share. model: a CausalLM or a ValueLM, whose `decoder` it is;
    see CausalLM for `row` and `looks`.
    """
    if model.context is not None:
        share = packing.Share.of(model.context, ids, predicting, row)
        if model.vision is None:
            output = decoder(input_ids=share.ids, use_cache=False, **share.arguments())
        else:
            output = model.vision.outputs(ids, row, looks, share)
        output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[share.at]
        return output, share
    read = ids[:, :-1]
    if model.vision is not None:
        output = model.vision.outputs(ids, row, looks)
    elif row is None:
        # padding is on the right, where a causal model does not attend, so no mask is needed
        output = decoder(input_ids=read, use_cache=False)
    else:
        output = decoder(input_ids=row.read(read)[None], use_cache=False, **row.arguments(decoder))
    at = predicting if row is None else (0, row.places[predicting])
    output.last_hidden_state = output.last_hidden_state[at]
    return output, None


def positions(config: Any) -> int | None:
    """Maximum number of positions of a model, with YaRN's factor; None if it has no limit."""
    settings = config.get_text_config(decoder=True).to_dict()
    longest: int | None = settings.get("max_position_embeddings")
    if longest is None:
        return settings.get("n_positions") or settings.get("max_seq_len")
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        longest = max(longest, int(original * rope.get("factor", 1.0)))
    return longest


def other_layers(lm: Any) -> list[str]:
    """The kinds of a model's layers other than attention to all previous tokens."""
    settings = lm.config.to_dict()
    windows = ["sliding_attention"] if settings.get("sliding_window") else []  # older models have it for all layers
    kinds = settings.get("layer_types") or windows
    other = sorted({kind for kind in kinds if kind != "full_attention"})
    return other or (["a state"] if lm._is_stateful else [])


def decoder_of(lm: Any) -> Any:
    """The submodule with the layers: the model's get_decoder() or, for some classes, a submodule of that."""
    for module in chain((lm.get_decoder(),), lm.modules()):
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        if lists and isinstance(module, transformers.PreTrainedModel):
            return module
    return lm.get_decoder()


def places_of(whole: Any, lm: Any) -> dict[str, str]:
    """Names of the decoder and the head in a language model -> their names in the composite model `whole`."""
    places = {}
    parts = (
        (decoder_of(lm), decoder_of(whole.get_decoder())),
        (lm.get_output_embeddings(), whole.get_output_embeddings()),
    )
    for inner, outer in parts:
        [name] = [name for name, module in lm.named_modules() if module is inner]
        [places[name]] = [name for name, module in whole.named_modules() if module is outer]
    return places
