"""Diffusers model folders, checked by names and headers before anything is loaded.

A cut download would otherwise end in a library's traceback, or in random weights.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from phalanx.config.flow import FlowModelConfig

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
# whose noise levels its family knows how to take
OTHER_SCHEDULERS = {"WanPipeline": "UniPCMultistepScheduler"}
# by their names in safetensors
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


def read_index(folder: Path) -> dict[str, Any]:
    """The model_index.json of a local folder, its components unseen; ValueError without one."""
    file = folder / "model_index.json"
    if not file.is_file():
        raise ValueError(f"model.path: '{folder}' is not a diffusers model folder: it has no model_index.json")
    index = read_json(file)
    if not isinstance(index, dict) or "_class_name" not in index:
        raise ValueError(f"model.path: {file} names no _class_name")
    return index


def component_names(index: dict[str, Any]) -> list[str]:
    """Folders that a model_index.json names."""
    return [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]


def absent_components(index: dict[str, Any]) -> dict[str, None]:
    """Components that the folder leaves out, as the keyword arguments that tell diffusers so."""
    return {name: None for name, value in index.items() if isinstance(value, list) and value[0] is None}


def check_components(folder: Path, index: dict[str, Any]) -> None:
    """Raise ValueError for the first component of a model_index.json that the folder lacks."""
    for name in component_names(index):
        part, kind = folder / name, str(index[name][1])
        if not part.is_dir():
            raise ValueError(f"model.path: '{folder}' lacks the folder {name!r} that its model_index.json names")
        for file in sorted(part.glob("*.json")):
            read_json(file)
        if name == "scheduler":
            if kind not in (SCHEDULER, OTHER_SCHEDULERS.get(index["_class_name"])):
                raise ValueError(f"model.path: '{folder}' has the scheduler {kind}; expected {SCHEDULER}")
            _require(part, "scheduler_config.json")
        elif "Tokenizer" in kind:
            _require(part, *_TOKENIZER_FILES)
        elif "Processor" not in kind and "FeatureExtractor" not in kind:
            _require(part, "config.json")
            _check_weights(part)


def check_tensors(path: str, **parts: nn.Module) -> None:
    """Raise ValueError where a part of a loaded pipeline got no value for one of its parameters."""
    for name, module in parts.items():
        lost = [key for key, p in module.named_parameters() if p.is_meta]
        if lost:
            more = f" (+{len(lost) - 1} more)" if len(lost) > 1 else ""
            raise ValueError(f"model.path: {path!r}: the weights of {name} lack the tensor {lost[0]}{more}")


def read_json(file: Path, key: str = "model.path") -> Any:
    """The content of a JSON file; ValueError with `key`, the folder's, and the mistake's place."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{key}: {file}:{error.lineno}:{error.colno} is not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{key}: {file} is not valid JSON: it is not UTF-8") from None


def _require(part: Path, *names: str) -> None:
    if not any((part / name).is_file() for name in names):
        raise ValueError(f"model.path: {part} has no {' or '.join(names)}")


def _check_weights(part: Path) -> None:
    for file in part.glob("*.safetensors.index.json"):
        for shard in sorted(set(read_json(file)["weight_map"].values())):
            if not (part / shard).is_file():
                raise ValueError(f"model.path: {part} lacks {shard}, which its {file.name} names")
    files = sorted(part.glob("*.safetensors"))
    if not files and not list(part.glob("*.bin")):
        raise ValueError(f"model.path: {part} has no weights (*.safetensors)")
    for file in files:
        try:
            with safe_open(file, "pt"):  # reads the header, and compares the file's length with it
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model.path: {file} is damaged or cut short: {error}") from None


def base_folder(config: FlowModelConfig) -> Path:
    """The base model's folder, from the hub's cache where it is a hub id."""
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    names = component_names(model_index(config.path))
    wanted = ["model_index.json", *(f"{name}/*" for name in names)]
    return Path(snapshot_download(config.path, allow_patterns=wanted))


def dtype_on_disk(folder: Path) -> torch.dtype:
    """The dtype of most of a component's tensors; float32 where it has no safetensors files."""
    names: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                names[tensors.get_slice(name).get_dtype()] += 1
    found = [name for name, _ in names.most_common(1) if name in _DTYPES]
    return _DTYPES[found[0]] if found else torch.float32


def model_index(path: str) -> dict[str, Any]:
    """The model_index.json of a diffusers folder or hub id; raises ValueError where it is neither."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path.count("/") == 1 and not path.startswith((".", "/", "~")):
            return _hub_index(path)
        raise ValueError(f"model.path: {path!r}: no such folder")
    index = read_index(folder)
    check_components(folder, index)
    return index


def _hub_index(repo: str) -> dict[str, Any]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return dict(json.loads(Path(hf_hub_download(repo, "model_index.json")).read_text()))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        raise ValueError(f"model.path: {repo!r}: no such folder, and no hub has it within reach") from None
