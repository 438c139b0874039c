"""Diffusers model folders, checked by names and headers before anything is loaded.

A cut download would otherwise end in a library's traceback, or in random weights.
"""

import importlib
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

from phalanx.config.files import kind as kind_of
from phalanx.config.files import parse_json, read_bytes
from phalanx.config.flow import FlowModelConfig
from phalanx.config.messages import cut, shown
from phalanx.engines.loading import check_weights

LIBRARIES = ("diffusers", "transformers")
MOST = 1e8  # of any number in a configuration
MOST_LAYERS = 10_000
_SHIFTS = {"shift", "flow_shift", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"}
_ENDINGS = ("json", "txt", "model", "jinja", "safetensors")  # of the files of a component that are read
SCHEDULER = "FlowMatchEulerDiscreteScheduler"
# whose noise levels its family knows how to take
OTHER_SCHEDULERS = {"WanPipeline": "UniPCMultistepScheduler"}
# by their names in safetensors
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


def read_index(folder: Path) -> dict[str, Any]:
    """The model_index.json of a local folder, its components unseen; ValueError without one.

    A component is [library, class] or [null, null], and nothing that it names can run code: diffusers would import
    whatever library is named here.
    """
    file = folder / "model_index.json"
    if not file.is_file():
        raise ValueError(f"model.path: '{folder}' is not a diffusers model folder: it has no model_index.json")
    return check_index(read_json(file), str(folder))


def check_index(index: Any, folder: str) -> dict[str, Any]:
    """The content of the model_index.json of a folder or hub id; ValueError for what diffusers must not see."""
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise ValueError(f"model.path: {folder}/model_index.json names no _class_name")
    for name, value in index.items():
        if not isinstance(value, list) or value == [None, None]:
            continue
        if not name.isidentifier() or len(value) != 2 or not all(isinstance(word, str) for word in value):
            raise ValueError(
                f"model.path: {folder}/model_index.json: {name!r} is {cut(repr(value))}; expected [library, class]"
            )
        library, kind = value
        if library not in LIBRARIES:
            raise ValueError(
                f"model.path: '{folder}' has its {name} from {cut(library)}; known: {', '.join(LIBRARIES)}"
            )
        known = _names(library)
        # published folders name a T5TokenizerFast, which transformers still knows, but lists no more
        if kind not in known and not (kind.endswith("TokenizerFast") and kind.removesuffix("Fast") in known):
            raise ValueError(f"model.path: '{folder}' has a {cut(kind)}, which the installed {library} lacks")
    return index


@cache
def _names(library: str) -> frozenset[str]:
    """What a library has; to list transformers takes a quarter of a second."""
    return frozenset(dir(importlib.import_module(library)))


def component_names(index: dict[str, Any]) -> list[str]:
    """Folders that a model_index.json names."""
    return [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]


def absent_components(index: dict[str, Any]) -> dict[str, None]:
    """Components that the folder leaves out, as the keyword arguments that tell diffusers so."""
    return {name: None for name, value in index.items() if isinstance(value, list) and value[0] is None}


def check_components(folder: Path, index: dict[str, Any]) -> None:
    """Raise ValueError for the first component of a model_index.json that the folder lacks, or that is damaged."""
    for name in ("transformer", "vae", "scheduler"):
        if name not in component_names(index):
            raise ValueError(f"model.path: {folder / 'model_index.json'} names no {name}")
    for name in component_names(index):
        part, kind = folder / name, str(index[name][1])
        if not part.is_dir():
            raise ValueError(f"model.path: '{folder}' lacks the folder {name!r} that its model_index.json names")
        for file in sorted(part.glob("*.json")):
            content = read_json(file)
            if not isinstance(content, dict):
                raise ValueError(f"model.path: {file} holds a {type(content).__name__}; expected an object, {{...}}")
            if file.name in ("config.json", "scheduler_config.json"):
                _check_numbers(content, str(file))
        if name == "scheduler":
            if kind not in (SCHEDULER, OTHER_SCHEDULERS.get(index["_class_name"])):
                raise ValueError(f"model.path: '{folder}' has the scheduler {kind}; expected {SCHEDULER}")
            _require(part, "scheduler_config.json")
            _check_scheduler(part / "scheduler_config.json")
        elif "Tokenizer" in kind:
            _require(part, *_TOKENIZER_FILES)
        elif "Processor" not in kind and "FeatureExtractor" not in kind:
            _require(part, "config.json")
            _check_weights(part)


def _check_numbers(value: Any, place: str) -> None:
    """Raise ValueError for a number that no layer can have: a library would allocate, or count to it."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _check_numbers(item, f"{place}: {key}")
            if isinstance(item, int) and "layers" in str(key) and not 0 <= item <= MOST_LAYERS:
                raise ValueError(f"model.path: {place}: {key} is {item}; expected 0 to {MOST_LAYERS}")
    elif isinstance(value, int | float) and not abs(value) <= MOST:  # NaN too
        raise ValueError(f"model.path: {place} is {value}; expected a number of at most {MOST:g}")


def _check_scheduler(file: Path) -> None:
    """Raise ValueError for settings that give no noise levels from 1 down to 0."""
    config = read_json(file)
    for name in _SHIFTS & config.keys():
        value = config[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"model.path: {file}: {name} is {shown(value)}; expected a number more than 0")
    steps = config.get("num_train_timesteps", 1000)
    if steps != 1000:
        raise ValueError(f"model.path: {file}: num_train_timesteps is {shown(steps)}; expected 1000")


def check_tensors(path: str, **parts: nn.Module) -> None:
    """Raise ValueError where a part of a loaded pipeline got no value for one of its parameters."""
    for name, module in parts.items():
        lost = [key for key, p in module.named_parameters() if p.is_meta]
        if lost:
            more = f" (+{len(lost) - 1} more)" if len(lost) > 1 else ""
            raise ValueError(f"model.path: {path!r}: the weights of {name} lack the tensor {lost[0]}{more}")


def check_layers(path: str, transformer: nn.Module) -> None:
    """Raise ValueError where the files hold a block, such as `transformer_blocks.7`, that the transformer was built
    without. Other tensors that it does not know are the library's business, which leaves them out.
    """
    known = {None, *map(_block, transformer.state_dict())}
    for file in sorted((Path(path) / "transformer").glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            extra = sorted(name for name in tensors.keys() if _block(name) not in known)  # noqa: SIM118
        if extra:
            raise ValueError(f"model.path: {file} holds {extra[0]}, for which its config.json has no layer")


def _block(tensor: str) -> str | None:
    """The numbered block that a tensor belongs to; None for one outside of all."""
    head, number, *_ = [*tensor.split("."), ""]
    return f"{head}.{number}" if number.isdigit() else None


def load_text_encoder(path: str, name: str, kind: str, dtype: torch.dtype) -> nn.Module:
    """A text encoder of transformers, which by itself would draw at random what the files lack.

    Raises ValueError for a tensor that is missing or of another shape.
    """
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    encoder, info = getattr(transformers, kind).from_pretrained(
        path, subfolder=name, dtype=dtype, use_safetensors=True, **told
    )
    check_weights(info, f"model.path: {path!r}: the weights of {name} are not whole")
    return encoder


def check_vae(path: str, config: Any) -> None:
    """Raise ValueError where latents could not be scaled, by the VAE's configuration."""
    scales = {name: config[name] for name in ("scaling_factor", "latents_std") if config.get(name) is not None}
    for name, value in scales.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise ValueError(f"model.path: {path!r}: the VAE's {name} is {value}; expected more than 0")
    if config.get("latents_mean") is not None or "shift_factor" not in config:
        return
    for name in ("scaling_factor", "shift_factor"):
        if not isinstance(config[name], int | float):
            raise ValueError(f"model.path: {path!r}: the VAE's {name} is {shown(config[name])}; expected a number")


def check_tokenizers(path: str, parts: dict[str, Any]) -> None:
    """Raise ValueError for a tokenizer that cannot tell texts apart, or has more tokens than its text encoder."""
    for name, tokenizer in parts.items():
        if not name.startswith("tokenizer") or tokenizer is None:
            continue
        if len({tuple(tokenizer(text)["input_ids"]) for text in ("0", "1", "a", "b")}) == 1:
            raise ValueError(f"model.path: {path!r}: {name} has the same tokens for all texts; its files are damaged")
        encoder = parts.get(name.replace("tokenizer", "text_encoder"))
        if encoder is not None and len(tokenizer) > (rows := encoder.get_input_embeddings().num_embeddings):
            raise ValueError(
                f"model.path: {path!r}: {name} has {len(tokenizer)} tokens, and its text encoder knows {rows}"
            )


def read_json(file: Path, key: str = "model.path") -> Any:
    """The content of a JSON file; ValueError with `key`, the folder's, and the mistake's place."""
    try:
        return parse_json(read_bytes(file).decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{key}: {file}:{error.lineno}:{error.colno} is not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{key}: {file} is not valid JSON: it is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"{key}: {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{key}: {file} is not valid JSON: {error}") from None


def _require(part: Path, *names: str) -> None:
    if not any((part / name).is_file() for name in names):
        raise ValueError(f"model.path: {part} has no {' or '.join(names)}")


def _check_weights(part: Path) -> None:
    for file in part.glob("*.safetensors.index.json"):
        shards = read_json(file).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"model.path: {file} has no weight_map, an object that names the file of each tensor")
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard or not (part / shard).is_file():
                raise ValueError(f"model.path: {part} lacks {shard}, which its {file.name} names")
    files = sorted(part.glob("*.safetensors"))
    if not files:
        pickles = sorted(part.glob("*.bin"))
        hint = f"; {pickles[0].name} is a pickle, which is not read: save it with safe_serialization" if pickles else ""
        raise ValueError(f"model.path: {part} has no weights (*.safetensors){hint}")
    for file in files:
        try:
            if kind_of(file) != "file":
                raise OSError(f"it is a {kind_of(file)}")
            with safe_open(file, "pt") as tensors:  # reads the header, and compares the file's length with it
                dtypes = {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(f"model.path: {file} is damaged or cut short: {error}") from None
        for name, dtype in dtypes.items():
            if name.endswith((".weight", ".bias")) and dtype[0] in "IUB" and dtype != "BF16":
                raise ValueError(f"model.path: {file}: {name} is of dtype {dtype}; expected floating point")


def base_folder(config: FlowModelConfig) -> Path:
    """The base model's folder; of a hub id the part of it that is read, from the hub or its cache."""
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    names = component_names(model_index(config.path, config.revision))
    wanted = [f"{name}/*.{ending}" for name in names for ending in _ENDINGS]
    patterns = ["model_index.json", *wanted]
    with _from_hub(config.path, config.revision):
        found = snapshot_download(
            config.path, revision=config.revision, allow_patterns=patterns, ignore_patterns=["*fp16*"]
        )
    return Path(found)


def dtype_on_disk(folder: Path) -> torch.dtype:
    """The dtype of most of a component's tensors; float32 where it has no safetensors files."""
    names: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                names[tensors.get_slice(name).get_dtype()] += 1
    found = [name for name, _ in names.most_common(1) if name in _DTYPES]
    return _DTYPES[found[0]] if found else torch.float32


def model_index(path: str, revision: str | None = None) -> dict[str, Any]:
    """The model_index.json of a diffusers folder or hub id; raises ValueError where it is neither."""
    try:
        is_folder = kind_of(Path(path)) == "folder"
    except OSError as error:
        raise ValueError(f"model.path: {cut(path)}: {error.strerror}") from None
    if is_folder:
        folder = Path(path).expanduser()
        index = read_index(folder)
        check_components(folder, index)
        return index
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ValueError(f"model.path: {path!r}: no such folder")
    from huggingface_hub import hf_hub_download

    with _from_hub(path, revision):
        file = Path(hf_hub_download(path, "model_index.json", revision=revision))
    return check_index(read_json(file), path)


@contextmanager
def _from_hub(path: str, revision: str | None) -> Iterator[None]:
    """Say in one line that a hub does not have what the block asks of it."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, OSError):
        at = "" if revision is None else f" at revision {revision!r}"
        raise ValueError(f"model.path: {path!r}: no such folder, and no hub has it{at} within reach") from None
