"""Loading of causal language models and their tokenizers from folders in transformers' format."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from phalanx.config.trained_model import LMModelConfig
from phalanx.engines.loading import check_weights, load_with_info, loading, warn_of_unread
from phalanx.models.lm import experts, packing
from phalanx.models.lm.composite import OF_WHOLE, check_text, text_part
from phalanx.models.lm.lm_folder import check_folder
from phalanx.models.lm.model import CausalLM, decoder_of, places_of
from phalanx.models.lm.vision import Vision
from phalanx.models.lora import Layers, lora_file, lora_key, read_adapter
from phalanx.models.stored import cast_weights, computes_alike, dtype_to_read, widen_buffers

log = logging.getLogger(__name__)

# the decoder's prefixes in a LoRA's names: in a composite model, also before transformers 4.52, or in a language model
_OF_LORA = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?|^model\.(?=layers\.)")
# settings of a GenerationConfig that change what is sampled
_SAMPLES_BY = (
    "bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "guidance_scale", "length_penalty", "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beams",
    "repetition_penalty", "sequence_bias", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
)  # fmt: skip


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
        raise ValueError(f"{here}: the layers of a {type(lm).__name__} are not where others are")
    check_weights(info, f"{here}: its weights are not whole")
    warn_of_unread(info, here)
    if unknown := unknown_keys(lm.config):
        log.warning("%s: its config.json has %s, which a %s does not read", here, unknown, type(lm.config).__name__)
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
    check_text(settings, text)
    # The composite class reads the files, which have its names of tensors; the other parts are dropped.
    whole, info = load_class(transformers.AutoModelForImageTextToText, config, dtype)
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(text, trust_remote_code=False)
    places = places_of(whole, lm)
    for inner, outer in places.items():
        lm.set_submodule(inner, whole.get_submodule(outer))
    lm.config, lm.generation_config = whole.config.text_config, whole.generation_config
    lm.config.tie_word_embeddings = whole.config.tie_word_embeddings
    log.info("only the text part of a %s, a %s, is trained", type(whole).__name__, type(lm).__name__)
    return lm, info, places


def load_class(kind: Any, config: LMModelConfig, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Load the folder's model by the auto class `kind` of transformers: the model and its loading info."""
    options = {"revision": config.revision, "attn_implementation": config.attn_implementation}
    lm, info = load_with_info(kind, config.path, dtype=dtype, **options)
    cast_weights(lm, dtype)
    return lm, info


def causal_lm(lm: Any, config: LMModelConfig, chunk: int, *, images: bool = False, tries: bool = False) -> CausalLM:
    """Wrap a loaded model and set it up by `config`; raises ValueError for settings that it does not support.

    tries: a model that does not pack is used without packing.
    """
    vision = Vision(lm, config) if images else None
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


def unknown_keys(settings: Any) -> str:
    """The keys of a model's config.json, transformers' `settings`, that its class does not know, such as "a, b"."""
    try:
        known = type(settings)().to_dict()
    except (TypeError, ValueError, StrictDataclassError):  # a class without defaults, of which nothing is known
        return ""
    return ", ".join(sorted(settings.to_dict().keys() - known.keys()))


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
