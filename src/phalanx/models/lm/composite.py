"""Where a language model lies in a composite model, such as one with a vision tower."""

import re
from typing import Any

import transformers

from phalanx.models.lm.lm_folder import CAUSAL

OF_WHOLE = re.compile(r"(lm\.)?(model\.(?:language_model|text_model))\.")  # a decoder's prefix in a composite model


def text_part(settings: Any) -> Any:
    """The text part's settings in those of a composite model, as with a vision tower; None for a language model."""
    names = settings.architectures or []
    if "text_config" not in settings.sub_configs or any(name.endswith(CAUSAL) for name in names):
        return None
    text = settings.text_config
    text.tie_word_embeddings = settings.tie_word_embeddings  # the composite class reads only its own setting
    return text


def check_text(settings: Any, text: Any) -> None:
    """Raise ValueError for a text part of which transformers has no causal language model."""
    if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = settings.architectures[0] if settings.architectures else type(settings).__name__
        raise ValueError(
            f"the text part of a {kind}, a {text.model_type}, has no causal language model in transformers"
        )


def name_in_whole(name: str, places: dict[str, str]) -> str:
    """A tensor's name in the composite model, by its name in the language model; see places_of."""
    for inner, outer in places.items():
        if name.startswith(f"{inner}."):
            return outer + name.removeprefix(inner)
    return name
