"""Folders of language models, looked at by their headers, without torch."""

import re
from collections import defaultdict
from pathlib import Path

from safetensors import safe_open

from phalanx.models.headers import check_weights, read_object, require

CAUSAL = ("ForCausalLM", "LMHeadModel", "MoeModelLM")  # how the classes of causal language models end
# of some of these transformers overlooks that they are damaged
_BESIDE = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def check_folder(path: str, key: str = "model.path") -> None:
    """Raise ValueError, in one line that begins with `key`, for a path that is neither a hub id nor the folder of a
    causal language model, or of a model that has one beside other parts.
    """
    folder = Path(path).expanduser()
    if folder.is_file():
        raise ValueError(f"{key}: {path!r} is a single file; expected a folder, with config.json and *.safetensors")
    if not path or not folder.is_dir():
        if path.count("/") != 1 or path.startswith((".", "/", "~")):
            raise ValueError(f"{key}: {path!r}: no such folder")
        return
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
    """Raise ValueError if an expert lacks a tensor that others of its layer have: transformers, which joins them,
    would not say which.
    """
    layers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name):
                    place, number, part = match.groups()
                    layers[place][part].add(int(number))
    for place, parts in layers.items():
        every = set[int]().union(*parts.values())
        for part, experts in sorted(parts.items()):
            if lacking := sorted(every - experts):
                raise ValueError(f"{key}: {str(folder)!r}: its weights are not whole: no {place}.{lacking[0]}.{part}")
