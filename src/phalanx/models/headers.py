"""Checks of the files of model folders by their names, sizes and headers.

They do without torch, so that a folder that cannot be loaded is reported within a second.
"""

import json
import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from phalanx.config.files import kind, parse_json, read_bytes, reading
from phalanx.config.messages import cut

MOST = 1e8  # limit of any number in a configuration
MOST_LAYERS = 10_000
MOST_BYTES = 1 << 27  # of a file other than weights, such as a tokenizer
MOST_VALUES = 1_000_000  # of a JSON file; the index of 140,000 tensors has two each
MOST_TOKENS = 8_000_000  # the same of a vocabulary and its merges
MOST_HEADER = 1 << 25  # bytes of a *.safetensors file's header, 150 of which a tensor takes
MOST_NAME = 1000  # characters of a tensor's name
MOST_GROWTH = 10_000  # times as long as a text that a tokenizer's replacements make of it
# files of any size, most of which are not read
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx")
_VARIANT = re.compile(r"[^.]+\.(\w+)(-\d+-of-\d+)?\.safetensors")  # as in model.fp16.safetensors


def check_files(folder: Path, key: str = "model.path") -> None:
    """Raise ValueError, which begins with the folder's `key`, for a pipe, a device or a huge file in a model's folder,
    which libraries would wait for, or read whole.
    """
    for file in sorted(folder.iterdir()):
        with reading(f"{key}: {file}"):
            form = kind(file)
        if form != "file":
            continue
        if file.suffix not in _WEIGHTS and file.stat().st_size > MOST_BYTES:
            raise ValueError(f"{key}: {file} has {file.stat().st_size} bytes; expected at most {MOST_BYTES}")
        if file.suffix == ".json":
            changed = file.stat()
            _check_json(file, key, changed.st_mtime_ns, changed.st_size)


@lru_cache(maxsize=64)  # a folder is checked by each of its readers
def _check_json(file: Path, key: str, changed: int, size: int) -> None:
    """Raise ValueError for a JSON file of absurdly many values, or a tokenizer whose texts would grow absurdly."""
    most = MOST_TOKENS if file.name in ("tokenizer.json", "vocab.json") else MOST_VALUES
    with reading(f"{key}: {file}"):
        content = read_bytes(file, MOST_BYTES)
    values = content.count(b",") + content.count(b"[") + content.count(b"{")
    if values > most:
        raise ValueError(f"{key}: {file} has about {values} values; expected at most {most}")
    if file.name == "tokenizer.json":
        settings = read_json(file, key)
        parts = [settings.get(name) for name in ("normalizer", "decoder")] if isinstance(settings, dict) else []
        if any(_text_growth(part) > MOST_GROWTH for part in parts):
            raise ValueError(f"{key}: {file} makes a text more than {MOST_GROWTH} times as long")


def _text_growth(part: Any) -> float:
    """How many times as long a text may become by the replacements of a normalizer or decoder of tokenizer.json."""
    if isinstance(part, list):
        return math.prod(map(_text_growth, part))
    if not isinstance(part, dict):
        return 1
    added, pattern = part.get("content"), part.get("pattern")
    growth = _text_growth(list(part.values()))  # the parts of a sequence
    if isinstance(added, str) and isinstance(pattern, dict):
        replaced = pattern.get("String")  # a regular expression may match between any two characters
        growth *= max(1, len(added) / max(1, len(replaced))) if isinstance(replaced, str) else 1 + len(added)
    return growth


def read_json(file: Path, key: str = "model.path") -> Any:
    """The content of a JSON file; raises ValueError with the config `key` of its folder and the error's position."""
    with reading(f"{key}: {file}"):
        content = read_bytes(file, MOST_BYTES)
    try:
        return parse_json(content.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{key}: {file}:{error.lineno}:{error.colno} is not valid JSON: {error.msg}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{key}: {file} is not valid JSON: it is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{key}: {file} is not valid JSON: {error}") from None


def read_object(file: Path, key: str = "model.path") -> dict[str, Any]:
    """As `read_json`, for a file that contains an object."""
    content = read_json(file, key)
    if not isinstance(content, dict):
        raise ValueError(f"{key}: {file} holds a {type(content).__name__}; expected an object, {{...}}")
    return content


def tensors(file: Path, key: str = "model.path") -> dict[str, tuple[str, list[int]]]:
    """The dtype, such as BF16 or F8_E4M3, and the shape of each tensor in a *.safetensors file, read from its header.

    Raises ValueError, which begins with the folder's `key`, for a file that is damaged or cut short.
    """
    parts = {}
    try:
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        if header > min(MOST_HEADER, file.stat().st_size):
            raise ValueError(f"{key}: {file} is damaged or cut short: its header has {header} bytes")
        with safe_open(file, "np") as stored:  # reads the header, and compares it with the file's length
            for name in stored.keys():  # noqa: SIM118 - it is not a dict
                if len(name) > MOST_NAME:
                    raise ValueError(f"{key}: {file} has a tensor whose name has {len(name)} characters")
                part = stored.get_slice(name)
                parts[name] = part.get_dtype(), part.get_shape()
    except (SafetensorError, OSError, MemoryError) as error:
        raise ValueError(f"{key}: {file} is damaged or cut short: {error}") from None
    return parts


def local_folder(path: str, key: str, single: str) -> Path | None:
    """The folder at `path`; None for what may be a hub id. Raises ValueError, which begins with `key`, for a path that
    is neither; `single`: the expectation that a single file does not meet.
    """
    try:
        form = kind(Path(path))
    except OSError as error:
        raise ValueError(f"{key}: {cut(path)}: {error.strerror}") from None
    if form == "file":
        raise ValueError(f"{key}: {path!r} is a single file; expected {single}")
    if form == "folder" and path:
        return Path(path).expanduser()
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ValueError(f"{key}: {path!r}: no such folder")
    return None


def require(part: Path, *names: str, key: str = "model.path") -> None:
    """Raise ValueError, with the config `key` of the folder, if it has none of these files."""
    if not any((part / name).is_file() for name in names):
        raise ValueError(f"{key}: {part} has no {' or '.join(names)}")


def check_weights(part: Path, key: str = "model.path") -> None:
    """Raise ValueError, which begins with the folder's `key`, if weights of a component are missing or unusable.

    Unusable are files that are damaged or cut short, and weights that are not floating point.
    """
    for file in part.glob("*.safetensors.index.json"):
        shards = read_object(file, key).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{key}: {file} has no weight_map, an object that names the file of each tensor")
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard or not (part / shard).is_file():
                raise ValueError(f"{key}: {part} lacks {shard}, which its {file.name} names")
    files = sorted(part.glob("*.safetensors"))
    if not files:
        pickles = sorted(part.glob("*.bin"))
        hint = f"; {pickles[0].name} is a pickle, which is not read: save it with safe_serialization" if pickles else ""
        raise ValueError(f"{key}: {part} has no weights (*.safetensors){hint}")
    check_variants(str(part), [file.name for file in files], key)
    for file in files:
        if kind(file) != "file":
            raise ValueError(f"{key}: {file} is damaged or cut short: it is a {kind(file)}")
        for name, (dtype, _) in tensors(file, key).items():
            if name.endswith((".weight", ".bias")) and dtype[0] in "IUB" and dtype != "BF16":
                raise ValueError(f"{key}: {file}: {name} is of dtype {dtype}; expected floating point")


def check_variants(part: str, files: list[str], key: str = "model.path") -> None:
    """Raise ValueError if all weight files of a component are of a variant, such as model.fp16.safetensors."""
    variants = [_VARIANT.fullmatch(file) for file in files]
    if variants and variants[0] is not None and all(variants):
        name = variants[0][1]
        raise ValueError(
            f"{key}: {part} has weights only of the variant {name}; write the folder anew without it, by "
            f"from_pretrained(..., variant={name!r}).save_pretrained(...) of the model's class"
        )


def check_numbers(value: Any, place: str) -> None:
    """Raise ValueError for a number too large for any layer, because a library would allocate or loop that much."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            check_numbers(item, f"{place}: {key}")
            if isinstance(item, int) and "layers" in str(key) and not 0 <= item <= MOST_LAYERS:
                raise ValueError(f"model.path: {place}: {key} is {item}; expected 0 to {MOST_LAYERS}")
    elif isinstance(value, int | float) and not abs(value) <= MOST:  # NaN too
        raise ValueError(f"model.path: {place} is {value}; expected a number of at most {MOST:g}")
