"""The supported families of vision-language models, by the names of their classes."""

from dataclasses import dataclass
from typing import Any

import transformers

from phalanx.config.trained_model import LMModelConfig
from phalanx.engines.loading import loading
from phalanx.models.lm.composite import text_part
from phalanx.models.lm.lm_folder import check_folder


@dataclass(frozen=True)
class Family:
    """rotary: position ids have parts for height and width. sizes: images keep their sizes, within bounds in pixels.
    types: the class takes token types, because tokens of an image attend to each other in both directions. tiles: the
    dimension of the pixels along which images are concatenated.
    """

    rotary: bool = False
    sizes: bool = False
    types: bool = False
    tiles: int = 0


_QWEN = Family(rotary=True, sizes=True)
FAMILIES = {
    "Qwen2VLForConditionalGeneration": _QWEN,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "SmolVLMForConditionalGeneration": Family(tiles=1),
    "Gemma3ForConditionalGeneration": Family(types=True),
}


def check(config: LMModelConfig, place: str) -> None:
    """Raise ValueError, in one line, if the model of `config` does not read images; `place` is a prompt with some."""
    settings, kind = _load_settings(config)
    if kind not in FAMILIES:
        known = ", ".join(name.partition("For")[0] for name in FAMILIES)
        reads = "which reads none" if "vision_config" not in settings.sub_configs else f"expected one of {known}"
        raise ValueError(f"{place} has images, and model.path: {config.path!r} is a {kind}, {reads}")


def is_needed(config: LMModelConfig) -> bool:
    """Whether all of the model is loaded even for prompts without images: its text part has no class by itself."""
    settings, kind = _load_settings(config)
    return kind in FAMILIES and type(text_part(settings)) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def _load_settings(config: LMModelConfig) -> tuple[Any, str]:
    """The configuration of a model's folder, and the name of its class."""
    check_folder(config.path)
    with loading(f"model.path: {config.path!r} does not load"):
        settings = transformers.AutoConfig.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=False
        )
    return settings, (settings.architectures or [type(settings).__name__])[0]
