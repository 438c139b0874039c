"""Causal language models of transformers, and their tokenizers."""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from phalanx.config.lm import LMModelConfig
from phalanx.distributed.context_parallel import ContextGroup
from phalanx.distributed.mesh import World
from phalanx.engines.loading import check_weights, loading, warn_of_unread
from phalanx.functional.tokens import Truncation, sampled_from, token_scores
from phalanx.models.lm import experts, llada2, packing
from phalanx.models.lm.headers import CAUSAL, check_folder
from phalanx.models.lora import Layers, lora_file, lora_key, read_adapter
from phalanx.models.stored import cast_weights, computes_alike, dtype_to_read, widen_buffers

log = logging.getLogger(__name__)

llada2.register()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# the keyword for the cache in a language model's forward, renamed in transformers 5.24
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
OF_WHOLE = re.compile(r"(lm\.)?(model\.(?:language_model|text_model))\.")  # a decoder's prefix in a composite model
# the decoder's prefixes in a LoRA's names: in a composite model, also before transformers 4.52, or in a language model
_OF_LORA = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?|^model\.(?=layers\.)")
# settings of a GenerationConfig that change what is sampled
_SAMPLES_BY = (
    "bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "guidance_scale", "length_penalty", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beams",
    "repetition_penalty", "sequence_bias", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
)  # fmt: skip


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
        if ids is None or predicting is None:
            set_checkpointing(self, False)
            if looks is not None:
                decoding |= self.vision.inputs(decoding.pop("input_ids"), looks)
            return self.lm(**decoding)
        set_checkpointing(self, torch.is_grad_enabled())
        output, share = outputs_at(self, decoder_of(self.lm), ids, predicting, row, looks)
        tokens, head = ids[:, 1:][predicting] if share is None else share.tokens, self.head(output)
        hidden = output.last_hidden_state
        options: dict[str, Any] = {"temperature": temperature, "chunk": self.chunk, "never": self.never}
        if truncation is not None and pool is None:
            pool = sampled_from(hidden, head, tokens, truncation, **options)
        scores = token_scores(hidden, head, tokens, pool=pool, fused=self.fused, **options)
        if share is not None:
            return share.whole(scores)
        return scores if pool is None else (*scores, *pool)

    @property
    def never(self) -> tuple[int, ...]:
        """Tokens excluded from the distributions: the placeholders of images."""
        return () if self.vision is None else self.vision.never

    def share_positions(self, world: World, name: str) -> None:
        """Under context parallelism, spread each pass's positions over ranks; `name` is model.attn_implementation.

        Raises ValueError for a model that does not support this.
        """
        if world.context is not None:
            self.context = ContextGroup.of(world.context)
            packing.spread(self.lm, self.context, name)

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
        """The layers, which are sharded one by one; their name depends on the class."""
        lists = [child for child in decoder_of(self.lm).children() if isinstance(child, nn.ModuleList)]
        return list(lists[0])


def set_checkpointing(model: Any, on: bool) -> None:
    """Switch gradient checkpointing of the layers on or off by their training mode, as transformers does.

    model: a CausalLM or a ValueLM, whose other modules stay in evaluation mode.
    """
    blocks = model.blocks()[: model.recomputes]
    if model.recomputes and model.vision is not None and not model.vision.frozen:
        blocks += model.vision.blocks()
    for block in blocks:
        block.training = on


def decoder_of(lm: Any) -> Any:
    """The submodule with the layers: the model's get_decoder() or, for some classes, a submodule of that."""
    for module in (lm.get_decoder(), *lm.modules()):
        lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
        if lists and isinstance(module, transformers.PreTrainedModel):
            return module
    return lm.get_decoder()


def text_part(settings: Any) -> Any:
    """The text part's settings in those of a composite model, as with a vision tower; None for a language model."""
    names = settings.architectures or []
    if "text_config" not in settings.sub_configs or any(name.endswith(CAUSAL) for name in names):
        return None
    text = settings.text_config
    text.tie_word_embeddings = settings.tie_word_embeddings  # the composite class reads only its own setting
    return text


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


def name_in_whole(name: str, places: dict[str, str]) -> str:
    """A tensor's name in the composite model, by its name in the language model; see places_of."""
    for inner, outer in places.items():
        if name.startswith(f"{inner}."):
            return outer + name.removeprefix(inner)
    return name


def outputs_at(
    model: Any, decoder: Any, ids: Tensor, predicting: Tensor, row: packing.Row | None, looks: Sequence[Any] | None
) -> tuple[Any, packing.Share | None]:
    """The decoder's output, with last_hidden_state [N, H] only at the positions `predicting` [B, T - 1] of ids [B, T].

    If ranks share positions, only at this rank's, and the share. model: a CausalLM or a ValueLM, whose `decoder` it is;
    see CausalLM for `row` and `looks`.
    """
    if model.context is not None:
        share = packing.Share.of(model.context, ids, predicting, row)
        output = decoder(input_ids=share.ids, use_cache=False, **share.arguments())
        output.last_hidden_state = output.last_hidden_state[share.predicting]
        return output, share
    if model.vision is not None:
        return model.vision.outputs_at(ids, predicting, row, looks), None
    read = ids[:, :-1]
    if row is None:
        # padding is on the right, where a causal model does not attend, so no mask is needed
        output = decoder(input_ids=read, use_cache=False)
        output.last_hidden_state = output.last_hidden_state[predicting]
        return output, None
    output = decoder(input_ids=row.read(read)[None], use_cache=False, **row.arguments(decoder))
    output.last_hidden_state = output.last_hidden_state[0, row.places[predicting]]
    return output, None


def load_model(
    config: LMModelConfig,
    dtype: torch.dtype,
    chunk: int,
    *,
    stored: bool = False,
    images: bool = False,
    tries: bool = False,
) -> CausalLM:
    """Load `config.path` in `dtype`; raises ValueError, in one line, if that fails.

    stored: parameters may keep the dtype of their files, and the caller casts them; see dtype_to_read. images: load
    all of a vision-language model, not only its text part. tries: see causal_lm.
    """
    here = f"{config:path}: {config.path!r}"
    check_folder(config.path, f"{config:path}")
    transformers.utils.logging.disable_progress_bar()  # every rank would draw its own progress bar
    log.info("loading the model %s", config.path)
    with loading(f"{here} does not load"):
        read = dtype_to_read(Path(config.path).expanduser(), dtype) if stored else dtype
        lm, info, places = _from_files(config, read, images)
        if read is not dtype:
            if computes_alike(lm):
                widen_buffers(lm, dtype)
                lm.config.dtype = dtype
            else:
                lm, info, places = _from_files(config, dtype, images)
    if not any(isinstance(child, nn.ModuleList) for child in decoder_of(lm).children()):
        # checked only now, because GPT-NeoX has this setting as well, and its layers are causal in any case
        if lm.config.to_dict().get("is_decoder") is False:
            raise ValueError(f"{here} is an encoder; expected a causal language model")
        raise ValueError(
            f"{config:path}: {config.path!r}: the layers of a {type(lm).__name__} are not where others are"
        )
    check_weights(info, f"{here}: its weights are not whole")
    warn_of_unread(info, here)
    model = causal_lm(lm, config, chunk, images=images, tries=tries)
    model.places = places
    return model


def _from_files(config: LMModelConfig, dtype: torch.dtype, images: bool) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """The model with weights in `dtype`, transformers' loading info, and places_of, {} for a plain language model."""
    settings = transformers.AutoConfig.from_pretrained(config.path, revision=config.revision, trust_remote_code=False)
    if images:
        return *load_class(transformers.AutoModelForImageTextToText, config, dtype), {}
    text = text_part(settings)
    if text is None:
        return *load_class(transformers.AutoModelForCausalLM, config, dtype), {}
    kind = settings.architectures[0] if settings.architectures else type(settings).__name__
    if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"the text part of a {kind}, a {text.model_type}, has no causal language model in transformers"
        )
    # The composite class reads the files, which have its names of tensors; the other parts are dropped.
    whole, info = load_class(transformers.AutoModelForImageTextToText, config, dtype)
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(text, trust_remote_code=False)
    places = places_of(whole, lm)
    for inner, outer in places.items():
        lm.set_submodule(inner, whole.get_submodule(outer))
    lm.config, lm.generation_config = whole.config.text_config, whole.generation_config
    lm.config.tie_word_embeddings = whole.config.tie_word_embeddings
    log.info("only the text part of a %s, a %s, is trained", kind, type(lm).__name__)
    return lm, info, places


def load_class(kind: Any, config: LMModelConfig, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Load the folder's model by the auto class `kind` of transformers: the model and its loading info."""
    lm, info = kind.from_pretrained(
        config.path,
        revision=config.revision,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    cast_weights(lm, dtype)
    return lm, info


def causal_lm(lm: Any, config: LMModelConfig, chunk: int, *, images: bool = False, tries: bool = False) -> CausalLM:
    """Wrap a loaded model and set it up by `config`; raises ValueError for settings that it does not support.

    tries: a model that does not pack is used without packing.
    """
    vision: Any = None
    if images:
        from phalanx.models.lm.vision import Vision

        vision = Vision(lm, config)
    if config.experts_implementation is not None:
        experts.use(lm, config)
    packs = bool(config.use_remove_padding)
    if packs:
        try:
            decoder = lm if vision is None else vision.packing()
            packing.check(decoder, f"{config:use_remove_padding}: true")
        except ValueError:
            if not tries:
                raise
            packs = False
            log.info("samples are padded, not packed: the layers of a %s would mix them", type(lm).__name__)
        else:
            attention = config.attn_implementation
            decoder.set_attn_implementation(packing.PACKED_SDPA if attention == "sdpa" else attention)
    if config.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = CausalLM(lm, chunk)
    model.vision, model.packs, model.tries = vision, packs, tries
    model.groups = packs and bool(config.use_prefix_grouper)
    model.recomputes = config.recomputed(len(model.blocks()))
    return model


def read_lora(path: str, config: LMModelConfig | None = None, names: Iterable[str] = ()) -> Layers:
    """The LoRA of model.lora_path, by the names of a CausalLM's layers.

    In the file, a composite model's text part may have the names of the composite model (current, or of transformers
    before 4.52) or those of a plain language model. `names` of the CausalLM's tensors tell which kind it is. Raises
    ValueError, in one line, for a file that is not a LoRA of such a model.
    """
    file = lora_file(path)
    with loading(f"model.lora_path: {path!r} does not load"):
        layers = read_adapter(file, lora_key(config))
    whole = next(filter(None, map(OF_WHOLE.match, names)), None)
    place: str = "model" if whole is None else whole[2]
    placed: Layers = {}
    for given, layer in layers.items():
        name = _OF_LORA.sub(f"{place}.", given)
        if whole is not None and not OF_WHOLE.match(name):
            raise ValueError(f"model.lora_path: {path!r} has {name}; expected only layers of the decoder, {place}")
        if f"lm.{name}" in placed:
            raise ValueError(f"model.lora_path: {path!r} has {name} twice, by different names")
        placed[f"lm.{name}"] = layer
    return placed


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


def load_tokenizer(config: LMModelConfig) -> Any:
    """The tokenizer of `config.path`; raises ValueError for one without an eos_token."""
    check_folder(config.path)
    with loading(f"model.path: the tokenizer of {config.path!r} does not load"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=False
        )
        tokenizer.encode("a")  # raises if a setting has a wrong type
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path: {config.path!r}: its tokenizer has no eos_token, by which a response would end")
    if tokenizer.chat_template is None:
        log.warning("the tokenizer of %s has no chat template: prompts are plain texts to continue", config.path)
    return tokenizer


def unused_generation(lm: Any) -> str:
    """The settings of generation_config.json by which other programs sample, such as "top_k 20, top_p 0.9"."""
    settings = lm.generation_config.to_diff_dict()
    named = {name: value for name, value in sorted(settings.items()) if name in _SAMPLES_BY}
    return ", ".join(f"{name} {value}" for name, value in named.items() if value not in (None, 1))


def end_tokens(lm: Any, tokenizer: Any) -> list[int]:
    """Tokens that end a response: the tokenizer's eos_token, and those of the model's generation_config.json."""
    listed = lm.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id}
    if listed is not None:
        ends.update(listed if isinstance(listed, list) else [listed])
    if not all(type(end) is int for end in ends):
        raise ValueError(
            f"model.path: {lm.name_or_path!r}: its generation_config.json has eos_token_id {listed!r}; expected a "
            "token's id, or a list of them"
        )
    return sorted(ends)
