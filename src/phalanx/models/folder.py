"""Whether a diffusers model folder is whole, found out from names and headers before anything is loaded.

A cut download would otherwise end in a library's traceback, or in random weights.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
OTHER_SCHEDULERS = {"WanPipeline": "UniPCMultistepScheduler"}  # whose noise levels its family knows how to take
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


def read_index(folder: Path) -> dict[str, Any]:
    """The model_index.json of a local folder, whose components are not looked at; ValueError where there is none."""
    file = folder / "model_index.json"
    if not file.is_file():
        raise ValueError(f"model.path: '{folder}' is no diffusers model folder: it has no model_index.json")
    index = read_json(file)
    if not isinstance(index, dict) or "_class_name" not in index:
        raise ValueError(f"model.path: {file} names no _class_name")
    return index


def check_components(folder: Path, index: dict[str, Any]) -> None:
    """Raise ValueError for the first component of a model_index.json that the folder does not hold as it should."""
    for name, value in index.items():
        if not isinstance(value, list) or value[0] is None:
            continue
        part, kind = folder / name, str(value[1])
        if not part.is_dir():
            raise ValueError(f"model.path: '{folder}' lacks the folder {name!r} that its model_index.json names")
        for file in sorted(part.glob("*.json")):
            read_json(file)
        if name == "scheduler":
            other = OTHER_SCHEDULERS.items()
            if kind != SCHEDULER and (index["_class_name"], kind) not in other:
                raise ValueError(f"model.path: '{folder}' has the scheduler {kind}; right is {SCHEDULER}")
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
    """The content of a JSON file; raises ValueError with the place of the mistake, in the folder that `key` names."""
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
