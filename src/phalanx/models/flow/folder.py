"""Diffusers model folders: loading their parts, and checks beyond those of names and headers."""

import importlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import ModelMixin
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from phalanx.config.messages import cut, shown
from phalanx.config.trained_model import FlowModelConfig
from phalanx.engines.loading import check_weights, listed, load_with_info, loading, unread_tensors, warn_of_unread
from phalanx.models.flow import pipeline_headers
from phalanx.models.flow.pipeline_headers import absent_components, check_index, component_names, module_of
from phalanx.models.headers import check_variants, read_json, tensors
from phalanx.models.lora import ADAPTER, BIAS, Layers, lora_file, plain_layers, read_adapter, renamed
from phalanx.models.stored import computes_alike, dtype_to_read, widen_buffers
from phalanx.models.traced import convert_traced

log = logging.getLogger(__name__)

_ENDINGS = ("json", "txt", "model", "jinja", "safetensors")  # file name extensions that a component is loaded from
_NATIVE = "diffusion_model."  # prefix of layers with the names of a model's own code in a LoRA's file
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by their names in safetensors


def read_index(folder: Path) -> dict[str, Any]:
    """As `headers.read_index`, but also raises ValueError for a class that the installed libraries lack."""
    return _check_classes(pipeline_headers.read_index(folder), str(folder))


def _check_classes(index: dict[str, Any], folder: str) -> dict[str, Any]:
    for name in component_names(index):
        library, kind = index[name]
        known = module_of(library).__all__  # dir() of transformers would take 0.14 s
        # published folders name a T5TokenizerFast, which transformers still has, but no longer lists
        if kind not in known and not (kind.endswith("TokenizerFast") and kind.removesuffix("Fast") in known):
            raise ValueError(f"model.path: '{folder}' has a {cut(kind)}, which the installed {library} lacks")
    return index


def how_to_load(folder: Path) -> str | None:
    """The call that loads a folder with diffusers, if from_pretrained needs arguments for components it lacks."""
    index = read_index(folder)
    name = index["_class_name"]
    optional = getattr(importlib.import_module("diffusers"), name)._optional_components
    absent = [f"{part}=None" for part in absent_components(index) if part not in optional]
    return f"{name}.from_pretrained({str(folder)!r}, {', '.join(absent)})" if absent else None


@contextmanager
def ignored_named(config: FlowModelConfig) -> Iterator[None]:
    """Within this context, log what diffusers ignores in a folder: tensors and settings that its classes do not know.

    Each is one line. diffusers' other messages, which a job cannot act on, are not shown.
    """
    library, ignored = logging.getLogger("diffusers"), _Ignored()
    level, handlers = library.level, library.handlers
    library.setLevel(logging.WARNING)
    library.handlers = [ignored]
    try:
        yield
    finally:
        library.setLevel(level)
        library.handlers = handlers
    for line in dict.fromkeys(ignored.lines):
        log.warning("%s: %r: %s", f"{config:path}", config.path, line)


class _Ignored(logging.Handler):
    """Collects, as one line each, the messages of diffusers about ignored tensors and settings."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        if match := re.search(r"were not used when initializing (\w+): \['?(.+?)'?\]$", message):
            self.lines.append(unread_tensors(match[1], sorted(match[2].split(", "))))
        elif match := re.search(r"config attributes (.+) were passed to (\w+), but are not expected", message):
            self.lines.append(f"{match[2]} does not know the settings {cut(match[1])} of its file, and ignores them")
        elif match := re.search(r"Keyword arguments (.+) are not expected by (\w+) and will be ignored", message):
            self.lines.append(f"{match[2]} does not know {cut(match[1])} of model_index.json, and ignores it")


def check_tensors(path: str, name: str, module: nn.Module) -> None:
    """Raise ValueError if the part `name` of a loaded pipeline has a tensor that the files gave no value."""
    state = module.state_dict()
    lost = [key for key, tensor in state.items() if tensor.is_meta]
    if isinstance(module, ModelMixin):  # diffusers leaves a buffer, such as the mean of latents, at its initial value
        held = {key for file in (Path(path) / name).glob("*.safetensors") for key in tensors(file)}
        lost += [key for key, b in module.named_buffers() if key in state and b.is_floating_point() and key not in held]
    if lost:
        raise ValueError(f"model.path: {path!r}: the weights of {name} lack the tensor {listed(lost)}")


def _check_layers(path: str, name: str, transformer: nn.Module) -> None:
    """Raise ValueError if the files have a block, such as `transformer_blocks.7`, that the transformer does not have.

    Other unknown tensors are ignored by diffusers, and named by `ignored_named`.
    """
    known = {None, *map(_block_name, transformer.state_dict())}
    for file in sorted((Path(path) / name).glob("*.safetensors")):
        extra = sorted(name for name in tensors(file) if _block_name(name) not in known)
        if extra:
            raise ValueError(f"model.path: {file} contains {extra[0]}, for which its config.json has no layer")


def read_lora(
    path: str,
    pipeline: Any,
    repeats: Callable[[str, Collection[str]], bool] | None = None,
    key: str = "model.lora_path",
) -> Layers:
    """The LoRA of model.lora_path, by diffusers' names of the transformer's layers.

    It may be peft's, or in any format that the pipeline's class reads. repeats: whether a tensor, by its name and those
    of the file, repeats others under a second name. key: that of warnings. Raises ValueError, in one line, for other
    files.
    """
    file = lora_file(path)
    with loading(f"model.lora_path: {path!r} does not load"):
        if file.name == ADAPTER:
            return read_adapter(file, key)
        with safe_open(file, "pt") as stored:
            metadata = json.loads((stored.metadata() or {}).get("lora_adapter_metadata", "{}"))

        def convert(given: dict[str, Tensor]) -> dict[str, Tensor]:
            tensors, *alphas, _ = pipeline.lora_state_dict(given, return_alphas=True, return_lora_metadata=True)
            for network_alphas in alphas:  # returned only by FLUX's pipelines
                tensors |= network_alphas or {}
            return dict(tensors)

        given = load_file(file)
        try:
            tensors, lost = convert_traced(given, convert)
        except (LookupError, ValueError):
            # the converters cut the names in a file with this prefix without looking, and fail with what is left
            tensors, lost = {}, sorted(name for name in given if not name.startswith(_NATIVE))
            if not 0 < len(lost) < len(given):
                raise
        empty = _beside_biases(lost, given)
        if empty:
            with suppress(LookupError, ValueError):  # of biases of which diffusers knows no layer
                tensors, lost = convert_traced(given | empty, convert)
        if lost and repeats is not None:
            twice = [name for name in lost if repeats(name, given)]
            lost = sorted({*lost} - {*twice})
            if twice:
                log.warning("%s: %r: %d tensors repeat others and are left out", key, path, len(twice))
        if lost:
            raise ValueError(
                f"its tensor {listed(lost)} cannot be used: expected the matrices, alphas and biases of a plain LoRA, "
                "all with one prefix"
            )
        settings = {name.removeprefix("transformer."): value for name, value in metadata.items()}
        layers = plain_layers(renamed(tensors, lambda name: name.removeprefix("transformer.")), settings)
        return {name: pair for name, pair in layers.items() if not empty or name.endswith(BIAS) or pair[1].any()}


def _beside_biases(lost: Sequence[str], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices of zeros for the layers of which a file changes only the bias, since diffusers drops these alone."""
    down, up = ("lora_A", "lora_B") if any(".lora_A." in name for name in given) else ("lora_down", "lora_up")
    matrices = {}
    for name in lost:
        if name.endswith(".diff_b"):
            layer, bias = name.removesuffix(".diff_b"), given[name]
            matrices[f"{layer}.{down}.weight"] = bias.new_zeros(1, 1)
            matrices[f"{layer}.{up}.weight"] = bias.new_zeros(len(bias), 1)
    return matrices


def _block_name(tensor: str) -> str | None:
    """The numbered block that a tensor belongs to; None for a tensor outside of all blocks."""
    head, number, *_ = [*tensor.split("."), ""]
    return f"{head}.{number}" if number.isdigit() else None


def load_transformer(kind: Any, path: str, name: str, weights_dtype: torch.dtype, *, stored: bool) -> Any:
    """Load the transformer in the folder `name`, of diffusers' class `kind`, for weights of `weights_dtype`.

    stored: its parameters keep the files' dtype if that is equivalent; see phalanx.models.stored. Raises ValueError if
    the files lack a tensor, or have a block too many.
    """
    files, read = {"pretrained_model_name_or_path": path, "subfolder": name}, weights_dtype
    if stored:
        read = dtype_to_read(Path(path) / name, weights_dtype)
    transformer = kind.from_pretrained(**files, dtype=read)
    if read is not weights_dtype and not computes_alike(transformer):
        read = weights_dtype
        transformer = kind.from_pretrained(**files, dtype=read)
    if read is weights_dtype:
        # not diffusers' own `to`, which warns about modules that it would keep in float32: all weights of a sharded
        # block have the same dtype
        nn.Module.to(transformer, weights_dtype)
    else:
        widen_buffers(transformer, weights_dtype)
    check_tensors(path, name, transformer)
    _check_layers(path, name, transformer)
    return transformer


def load_text_encoder(path: str, name: str, kind: str, dtype: torch.dtype, key: str = "model.path") -> nn.Module:
    """Load a text encoder of transformers. Raises ValueError for a tensor that is missing or has another shape."""
    encoder, info = load_with_info(getattr(transformers, kind), path, subfolder=name, dtype=dtype)
    check_weights(info, f"{key}: {path!r}: the weights of {name} are not whole")
    warn_of_unread(info, f"{key}: {path!r}: {name}")
    return encoder


def check_vae(path: str, config: Any) -> None:
    """Raise ValueError if the VAE's configuration has no valid scale for latents."""
    for name in ("scaling_factor", "latents_std"):
        value = config.get(name)
        if value is None:
            continue
        numbers = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(number, int | float) and number > 0 for number in numbers):
            raise ValueError(f"model.path: {path!r}: the VAE's {name} is {value}; expected more than 0")
    if config.get("latents_mean") is not None or "shift_factor" not in config:
        return
    for name in ("scaling_factor", "shift_factor"):
        if not isinstance(config[name], int | float):
            raise ValueError(f"model.path: {path!r}: the VAE's {name} is {shown(config[name])}; expected a number")


def check_parts(path: str, parts: dict[str, Any], channels: tuple[int, int] | None) -> None:
    """Raise ValueError for a part of a loaded pipeline that lacks tensors, or that does not fit the others.

    channels: see FlowModel.input_channels; None: not checked here.
    """
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            check_tensors(path, name, part)
    c = parts["vae"].config
    check_vae(path, c)
    if channels is not None:
        latent = c["z_dim"] if "z_dim" in c else c["latent_channels"]
        check_channels(path, parts["transformer"].config, channels[0] * latent + channels[1])
    check_tokenizers(path, parts)


def check_channels(path: str, config: Any, expected: int, as_of: str = "") -> None:
    """Raise ValueError for a transformer with other channels of input, such as one that takes a control image."""
    if config.in_channels != expected:
        raise ValueError(
            f"model.path: the transformer of {path!r} has {config.in_channels} channels of input; expected "
            f"{expected}{as_of}"
        )


def check_tokenizers(path: str, parts: dict[str, Any]) -> None:
    """Raise ValueError for a tokenizer with the same tokens for all texts, or with more than its encoder embeds."""
    for name, tokenizer in parts.items():
        if not name.startswith("tokenizer") or tokenizer is None:
            continue
        if len({tuple(tokenizer(text)["input_ids"]) for text in ("0", "1", "a", "b")}) == 1:
            raise ValueError(f"model.path: {path!r}: {name} has the same tokens for all texts; its files are damaged")
        encoder = parts.get(name.replace("tokenizer", "text_encoder"))
        if encoder is not None and len(tokenizer) > (rows := encoder.get_input_embeddings().num_embeddings):
            raise ValueError(
                f"model.path: {path!r}: {name} has {len(tokenizer)} tokens, and its text encoder embeds {rows}"
            )


def base_folder(config: FlowModelConfig) -> Path:
    """The base model's folder; for a hub id, a snapshot of the files that are used, from the hub or its cache."""
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import list_repo_files, snapshot_download

    names = component_names(model_index(config.path, config.revision))
    patterns = ["model_index.json"]
    for name in names:
        patterns += [f"{name}/*.{ending}" for ending in _ENDINGS]
    with _from_hub(config.path, config.revision):
        folder = Path(
            snapshot_download(
                config.path, revision=config.revision, allow_patterns=patterns, ignore_patterns=["*fp16*"]
            )
        )
    for name in names:
        if (folder / name / "config.json").is_file() and not any((folder / name).glob("*.safetensors")):
            files: list[str] = []
            with suppress(OSError):  # the hub is out of reach: loading then reports what the cache lacks
                files = list_repo_files(config.path, revision=config.revision)
            stored = [file for file in files if file.startswith(f"{name}/") and file.endswith(".safetensors")]
            check_variants(f"{config.path}/{name}", [file.removeprefix(f"{name}/") for file in stored])
    return folder


def dtype_on_disk(folder: Path) -> torch.dtype:
    """The most common dtype among a component's tensors; float32 if it has no safetensors files."""
    counts: Counter[str] = Counter()
    for file in folder.glob("*.safetensors"):
        counts.update(dtype for dtype, _ in tensors(file).values())
    for name, _ in counts.most_common(1):
        return _DTYPES.get(name, torch.float32)
    return torch.float32


def model_index(path: str, revision: str | None = None) -> dict[str, Any]:
    """The model_index.json of a diffusers folder or hub id; raises ValueError if `path` is neither."""
    index = pipeline_headers.local_index(path)
    if index is None:
        from huggingface_hub import hf_hub_download

        with _from_hub(path, revision):
            file = Path(hf_hub_download(path, "model_index.json", revision=revision))
        index = check_index(read_json(file), path)
    return _check_classes(index, path)


@contextmanager
def _from_hub(path: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub into ValueErrors of one line."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, OSError):
        at = "" if revision is None else f" at revision {revision!r}"
        raise ValueError(f"model.path: {path!r}: no such folder, and no hub has it{at} within reach") from None
