"""What a rank can tell about itself, its machine and the files it sees, without talking to any other."""

import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from phalanx import __version__
from phalanx.config.tasks import CheckClusterConfig
from phalanx.distributed.mesh import Launch
from phalanx.models.family import model_index
from phalanx.models.folder import check_components

LIBRARIES = ("diffusers", "transformers", "peft", "accelerate", "safetensors")
ENOUGH = 0.9  # share of a GPU's memory that is free where nobody else uses it


@dataclass(frozen=True)
class Place:
    """Where a rank runs; `node` is the number of its torchrun."""

    rank: int
    node: int
    host: str
    local_world_size: int

    @classmethod
    def here(cls, launch: Launch, env: Mapping[str, str] = os.environ) -> "Place":
        node = env.get("GROUP_RANK", str(launch.rank // launch.local_world_size))
        return cls(launch.rank, int(node), socket.gethostname(), launch.local_world_size)


@dataclass(frozen=True)
class Gpu:
    """The GPU of one rank, in GB (10^9 bytes); `users` says who holds its memory, "" where that is not known."""

    name: str
    uuid: str
    memory_gb: float
    free_gb: float
    users: str


@dataclass(frozen=True)
class Seat:
    """What a rank computes on: the GPUs that it sees, and its own (None: there is none of its number)."""

    visible: int
    gpu: Gpu | None

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Seat":
        return cls(facts["visible"], None if facts["gpu"] is None else Gpu(**facts["gpu"]))


@dataclass(frozen=True)
class PathFact:
    """A path of the configuration, as one node sees it: its bytes, or what is wrong. `here`: nothing to download."""

    path: str
    size: int = 0
    problem: str | None = None
    here: bool = True


@dataclass(frozen=True)
class Machine:
    """A node as its first rank sees it. Memory and disks in GB (10^9 bytes); `locked_gb` None: unlimited."""

    versions: dict[str, str]
    settings: dict[str, str]
    memory_gb: float
    memory_free_gb: float
    shm_free_gb: float
    disk_free_gb: float
    open_files: int
    infiniband: bool
    locked_gb: float | None
    paths: dict[str, PathFact]

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Machine":
        return cls(**{**facts, "paths": {key: PathFact(**fact) for key, fact in facts["paths"].items()}})


def look_at_seat(local_rank: int) -> Seat:
    """This rank's GPU, of the number that `mesh.start` gives it."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= visible:
        return Seat(visible, None)
    free, total = torch.cuda.mem_get_info(local_rank)
    properties = torch.cuda.get_device_properties(local_rank)
    uuid = str(properties.uuid)
    users = gpu_users(uuid) if free < ENOUGH * total else ""
    return Seat(visible, Gpu(properties.name, uuid, total / 1e9, free / 1e9, users))


def gpu_users(uuid: str) -> str:
    """Processes with memory on a GPU, by nvidia-smi; "" where it knows none. In a container it may see none."""
    fields = "--query-compute-apps=pid,process_name,used_memory"
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", fields, "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    rows = [line.split(", ") for line in listed.stdout.splitlines() if line.count(", ") == 2]
    own = str(os.getpid())
    return ", ".join(f"{Path(name).name} (process {pid}, {used})" for pid, name, used in rows if pid != own)


def look_at_machine(cfg: CheckClusterConfig) -> Machine:
    """This node's software, memory, disks, limits, and the files that the configuration names."""
    memory = dict(re.findall(r"^(\w+): +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    folder = Path(cfg.trainer.output_dir).absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    infiniband = Path("/sys/class/infiniband")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        versions=versions(),
        settings=dict(flat(asdict(cfg))),
        memory_gb=int(memory["MemTotal"]) * 1024 / 1e9,
        memory_free_gb=int(memory["MemAvailable"]) * 1024 / 1e9,
        shm_free_gb=shutil.disk_usage("/dev/shm").free / 1e9,
        disk_free_gb=shutil.disk_usage(existing).free / 1e9,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        infiniband=infiniband.is_dir() and any(infiniband.iterdir()),
        locked_gb=None if locked == resource.RLIM_INFINITY else locked / 1e9,
        paths={key: look_at_path(key, path) for key, path in named_paths(cfg)},
    )


def versions() -> dict[str, str]:
    """Versions of all that must be the same on every node; "none" where there is no such thing."""
    cuda = torch.cuda.is_available()
    driver = Path("/proc/driver/nvidia/version")
    number = re.search(r"\b\d+\.\d+(\.\d+)?\b", driver.read_text()) if driver.is_file() else None
    found = {
        "phalanx": f"{__version__} (source {source_digest()})",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "ROCm": torch.version.hip or "none",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if cuda and dist.is_nccl_available() else "none",
        "NVIDIA driver": number[0] if number else "none",
    }
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def source_digest() -> str:
    """Six digits that differ where the source of phalanx does, as in a checkout that was not updated."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=3)
    for file in sorted(root.rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys of a configuration with their values as text."""
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value)


def named_paths(cfg: CheckClusterConfig) -> Iterator[tuple[str, str]]:
    """Key and path of all that a training job would read."""
    if cfg.model.path:
        yield "model.path", cfg.model.path
    for name, files in (("data.train_files", cfg.data.train_files), ("data.val_files", cfg.data.val_files)):
        for i, file in enumerate(files):
            yield f"{name}[{i}]", file
    for i, function in enumerate(cfg.reward.functions):
        file = (function.path or "").partition(":")[0]
        if file.endswith(".py"):
            yield f"reward.functions[{i}].path", file


def look_at_path(key: str, path: str) -> PathFact:
    """Open what `path` names: a diffusers model folder or hub id, a data file, or a folder of them."""
    try:
        if key == "model.path":
            return look_at_model(path)
        found = Path(path).expanduser()
        folder, colon, _ = path.rpartition(":")
        if colon and not found.exists():
            found = Path(folder).expanduser()  # folder:split
        return PathFact(path, bytes_below(found))
    except OSError as error:
        return PathFact(path, problem=f"{path}: {(error.strerror or str(error)).lower()}")
    except ValueError as error:
        return PathFact(path, problem=str(error).removeprefix(f"{key}: "))


def look_at_model(path: str) -> PathFact:
    """A model folder, whole and with readable headers; of a hub's model, the part of it in this node's cache."""
    index = model_index(path)
    folder = Path(path).expanduser()
    here = folder.is_dir()
    if not here:
        from huggingface_hub import hf_hub_download

        folder = Path(hf_hub_download(path, "model_index.json", local_files_only=True)).parent
        try:
            check_components(folder, index)
            here = True
        except ValueError:
            return PathFact(path, here=False)
    parts = [name for name, value in index.items() if isinstance(value, list) and value[0] is not None]
    return PathFact(path, sum(bytes_below(folder / name) for name in ("model_index.json", *parts)))


def bytes_below(path: Path) -> int:
    """The size of a file, or of all files in a folder, each of which is opened; raises OSError."""
    walk = os.walk(path, onerror=_refuse)
    files = [Path(root, name) for root, _, names in walk for name in names] if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as content:
            content.read(1)
    return sum(file.stat().st_size for file in files)


def _refuse(error: OSError) -> NoReturn:
    raise error
