"""Checks of language models' folders by their headers, without torch."""

import re
from collections import defaultdict
from pathlib import Path

from phalanx.models.headers import check_files, check_weights, local_folder, read_object, require, tensors

CAUSAL = ("ForCausalLM", "LMHeadModel", "MoeModelLM")  # suffixes of the classes of causal language models
# further files to check, because transformers ignores damage in some of them
_BESIDE = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def check_folder(path: str, key: str = "model.path") -> None:
    """Raise ValueError, in one line that begins with `key`, for a path that is not a language model's.

    Accepted are hub ids, folders of causal language models, and folders of composite models with a language model.
    """
    folder = local_folder(path, key, "a folder, with config.json and *.safetensors")
    if folder is None:
        return
    check_files(folder, key)
    if (folder / "model_index.json").is_file():
        raise ValueError(f"{key}: {path!r} is a diffusers pipeline; expected a causal language model's folder")
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{key}: {path!r} is an adapter of peft; expected a whole model, with the adapter merged")
    require(folder, "config.json", key=key)
    settings = read_object(folder / "config.json", key)
    for name in _BESIDE:
        if (folder / name).is_file():
            read_object(folder / name, key)
    names, text = settings.get("architectures"), settings.get("text_config")
    if isinstance(names, list) and names and not any(str(name).endswith(CAUSAL) for name in names) and not text:
        raise ValueError(f"{key}: {path!r} is a {names[0]}; expected a causal language model")
    check_weights(folder, key)
    _check_experts(folder, key)


def _check_experts(folder: Path, key: str) -> None:
    """Raise ValueError if an expert lacks a tensor that others in its layer have.

    transformers concatenates the experts' tensors, and would not report which one is missing.
    """
    layers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("*.safetensors"):
        for name in tensors(file, key):
            if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name):
                place, number, part = match.groups()
                layers[place][part].add(int(number))
    for place, parts in layers.items():
        every = set[int]().union(*parts.values())
        for part, experts in sorted(parts.items()):
            if lacking := sorted(every - experts):
                raise ValueError(f"{key}: {str(folder)!r}: its weights are not whole: no {place}.{lacking[0]}.{part}")
