"""The record of a run's start, beside its configuration: versions, processor, ranks and the contents of files.

Each start of a job adds an entry to `provenance.json` in the run's folder; `phalanx rerun` and `phalanx diff` read it.
"""

import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from phalanx.config.files import parse_json
from phalanx.config.inside import read_inside, write_inside
from phalanx.config.joint import POLICIES
from phalanx.config.secrets import hide, public
from phalanx.config.shipped import ROOT, located
from phalanx.distributed.mesh import World

PROVENANCE_FILE = "provenance.json"
MOST_PROVENANCE = 1 << 22  # bytes
# distributions that take part in the numbers of a run
DISTRIBUTIONS = ("phalanx", "torch", "transformers", "tokenizers", "diffusers", "peft", "datasets", "numpy", "vllm")
# environment variables that choose among kernels
KERNELS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
VARIABLES = (*KERNELS, "OMP_NUM_THREADS")
LONGEST_PATH = 4096  # characters
BLOCK, BLOCKS = 1 << 20, 64  # bytes of a block; blocks that are read of a larger file


def write_provenance(cfg: Any, world: World, folder: Path, step: int) -> None:
    """Add an entry for a start after `step` training steps; a new run begins a new list. Raises OSError."""
    entries = []
    for entry in read_provenance(folder):
        if entry["step"] < step:
            entries.append(entry)
    entries.append({"step": step} | describe_start(cfg, world))
    write_inside(folder, PROVENANCE_FILE, json.dumps(entries, indent=1) + "\n")


def read_provenance(folder: Path) -> list[dict[str, Any]]:
    """The entries of a run, in the order of their steps; empty if there are none that can be read."""
    try:
        entries = parse_json(read_inside(folder, PROVENANCE_FILE, MOST_PROVENANCE).decode())
    except (OSError, ValueError):
        return []
    return entries if isinstance(entries, list) and all(map(_is_entry, entries)) else []


def _is_entry(entry: Any) -> bool:
    """Whether an entry has the form that `describe_start` gives it."""
    if not isinstance(entry, dict) or not isinstance(entry.get("step"), int) or not isinstance(entry.get("task"), str):
        return False
    inputs = entry.get("inputs")
    maps = [entry.get("versions"), entry.get("processor"), *(inputs.values() if isinstance(inputs, dict) else [None])]
    texts = all(isinstance(part, dict) and all(isinstance(value, str) for value in part.values()) for part in maps)
    ranks, command = entry.get("ranks"), entry.get("command", [])  # earlier versions recorded none
    texts = texts and isinstance(command, list) and all(isinstance(word, str) for word in command)
    return texts and isinstance(ranks, dict) and all(isinstance(value, int) for value in ranks.values())


def describe_start(cfg: Any, world: World) -> dict[str, Any]:
    """An entry of provenance.json but for its step."""
    mesh = {"world": world.size, "shard": world.shard_size, "context": world.context_size}
    return {
        "task": shipped_name(Path(sys.argv[0])),
        "command": list(map(hide, sys.argv[1:])),
        "ranks": mesh,
        "versions": installed_versions(),
        "processor": describe_processor(world.device),
        "inputs": digest_inputs(public(cfg)),
    }


def installed_versions() -> dict[str, str]:
    """The versions of Python, of this source code (a digest) and of the installed DISTRIBUTIONS."""
    versions = {"python": sys.version.split()[0], "source": digest_path(Path(__file__).parents[1])}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__  # with the build, such as +cpu
    return versions


def describe_processor(device: torch.device) -> dict[str, str]:
    """The processor, its instruction set as torch uses it, the threads and the VARIABLES; on CUDA the device's name."""
    cpu = Path("/proc/cpuinfo")
    text = cpu.read_text() if cpu.exists() else ""
    described = {}
    for name in ("vendor_id", "cpu family", "model", "model name"):
        match = re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE)
        if match:
            described[name.replace(" ", "_")] = match[1]
    described |= {"instructions": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}
    for name in VARIABLES:
        if name in os.environ:
            described[name] = os.environ[name]
    if device.type == "cuda":
        described["device"] = torch.cuda.get_device_name(device)
    return described


def digest_inputs(config: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The path and the digest of each file or folder that a value of the configuration names, by its dotted key."""
    inputs = {}
    for key, value in texts_of(config):
        file = file_of(value)
        looks_like_path = "/" in file or Path(file).suffix
        if key.startswith("trainer.") or not looks_like_path or len(file) > LONGEST_PATH or "://" in file:
            continue
        try:
            path = Path(located(file))
            inputs[key] = {"path": shipped_name(path), "sha256": digest_path(path)}
        except (OSError, ValueError):  # no path, or one that may not be read
            continue
    return inputs


def file_of(value: str) -> str:
    """The file of a value such as `rewards.py:score`, a function or class in it; other values as they are."""
    return re.sub(r"\.py:\w+$", ".py", value)


def texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """All texts within a configuration, with their dotted keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from texts_of(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from texts_of(inner, f"{key}[{place}]")


def shipped_name(path: Path) -> str:
    """The path relative to the shipped files, which other machines have too; absolute if it is not one of them."""
    whole = path.expanduser().absolute()
    return str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else str(whole)


def digest_path(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files in a folder or of a pattern such as data/*.jsonl;
    bytecode and hidden files are left out. Of a file of more than BLOCKS blocks, its size and BLOCKS evenly spaced
    blocks are read. Raises OSError.
    """
    total = hashlib.sha256()
    if path.is_file():
        _add_file(total, path)
        return total.hexdigest()
    folder = path if path.is_dir() else path.parent
    files = sorted(path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path))))
    if not files:
        raise FileNotFoundError(str(path))
    for file in files:
        name = file.relative_to(folder) if file.is_relative_to(folder) else Path(file.name)
        hidden = any(part.startswith((".", "__pycache__")) for part in name.parts)
        if not hidden and file.is_file():
            total.update(f"{name}\0".encode())
            _add_file(total, file)
    return total.hexdigest()


def _add_file(total: "hashlib._Hash", file: Path) -> None:
    size = file.stat().st_size
    total.update(f"{size}\0".encode())
    with file.open("rb") as content:
        if size <= BLOCK * BLOCKS:
            total.update(content.read())
            return
        for number in range(BLOCKS):
            content.seek((size - BLOCK) * number // (BLOCKS - 1))
            total.update(content.read(BLOCK))


def with_whole_path(cfg: Any) -> Any:
    """The configuration with absolute paths of model folders, so that later commands find them from any folder."""
    if "model" not in vars(cfg):  # a joint run's
        return replace(cfg, **{name: with_whole_path(vars(cfg)[name]) for name in POLICIES})
    folder = Path(cfg.model.path).expanduser()
    if folder.is_absolute() or not folder.is_dir():
        return cfg
    return replace(cfg, model=replace(cfg.model, path=str(folder.absolute())))
