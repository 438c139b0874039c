"""Facts that a rank collects by itself: its place, its GPU, its machine, and the files of the configuration."""

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from phalanx import __version__
from phalanx.config.load import flat
from phalanx.config.tasks import CheckClusterConfig
from phalanx.data.hub import SCHEME
from phalanx.distributed.launch_env import Launch
from phalanx.models.flow.folder import model_index
from phalanx.models.flow.pipeline_headers import check_components
from phalanx.run.devices import nvidia_smi
from phalanx.run.provenance import digest_path
from phalanx.tools.cluster import infiniband

LIBRARIES = ("diffusers", "transformers", "peft", "accelerate", "safetensors")
ENOUGH = 0.9  # minimum fraction of free memory on a GPU that nobody else uses


@dataclass(frozen=True)
class RankInfo:
    """The place of a rank; `node` is the number of its launcher."""

    rank: int
    node: int
    host: str
    local_world_size: int

    @classmethod
    def here(cls, launch: Launch) -> "RankInfo":
        node = os.environ.get("GROUP_RANK", str(launch.rank // launch.local_world_size))
        return cls(launch.rank, int(node), socket.gethostname(), launch.local_world_size)


@dataclass(frozen=True)
class Gpu:
    """The GPU of one rank, with memory in GB (10^9 bytes), and the number of GPUs visible to the rank.

    `name` is "" if there is no GPU for the rank; `users` lists the processes that use its memory, "" if unknown.
    """

    visible: int
    name: str = ""
    uuid: str = ""
    memory_gb: float = 0.0
    free_gb: float = 0.0
    users: str = ""


@dataclass(frozen=True)
class PathFact:
    """A path of the configuration on one node: its size in bytes, or a problem.

    `here` is False for a hub model that would have to be downloaded.
    """

    path: str
    size: int = 0
    problem: str | None = None
    here: bool = True


@dataclass(frozen=True)
class Machine:
    """The facts of a node, collected by its first rank; memory and disks are in GB (10^9 bytes).

    `locked_gb` is the maximum memory that a process may lock, None if unlimited. `infiniband_unused`: why NCCL would
    not use the machine's InfiniBand; None if it would, or without InfiniBand or GPUs.
    """

    versions: dict[str, str]
    settings: dict[str, str]
    memory_gb: float
    memory_free_gb: float
    shm_free_gb: float | None  # None on macOS, which has no /dev/shm
    disk_free_gb: float
    open_files: int
    infiniband: bool
    infiniband_unused: str | None
    locked_gb: float | None
    paths: dict[str, PathFact]

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Machine":
        paths = {key: PathFact(**fact) for key, fact in facts["paths"].items()}
        return cls(**facts | {"paths": paths})


def look_at_gpu(local_rank: int) -> Gpu:
    """The GPU that `mesh.start` assigns to this rank."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank >= visible:
        return Gpu(visible)
    free, total = torch.cuda.mem_get_info(local_rank)
    properties = torch.cuda.get_device_properties(local_rank)
    uuid = str(properties.uuid)
    users = gpu_users(uuid) if free < ENOUGH * total else ""
    return Gpu(visible, properties.name, uuid, total / 1e9, free / 1e9, users)


def gpu_users(uuid: str) -> str:
    """Other processes with memory on a GPU, by nvidia-smi, which may not see any in a container; "" if unknown."""
    users, query = [], "--query-compute-apps=pid,process_name,used_memory"
    for line in nvidia_smi("-i", f"GPU-{uuid}", query, "--format=csv,noheader"):
        fields = line.split(", ")
        if len(fields) == 3 and fields[0] != str(os.getpid()):
            pid, name, used = fields
            users.append(f"{Path(name).name} (process {pid}, {used})")
    return ", ".join(users)


def look_at_machine(cfg: CheckClusterConfig) -> Machine:
    """Collect this node's software, memory, disks, limits, and the files named by the configuration."""
    shared = Path("/dev/shm")
    total_gb, free_gb = main_memory()
    folder = Path(cfg.trainer.output_dir).absolute()
    existing = next(p for p in (folder, *folder.parents) if p.exists())
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        versions=versions(),
        settings=flat(asdict(cfg)),
        memory_gb=total_gb,
        memory_free_gb=free_gb,
        shm_free_gb=shutil.disk_usage(shared).free / 1e9 if shared.is_dir() else None,
        disk_free_gb=shutil.disk_usage(existing).free / 1e9,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        infiniband=infiniband.is_there(),
        infiniband_unused=infiniband.unused() if torch.cuda.is_available() else None,
        locked_gb=None if locked == resource.RLIM_INFINITY else locked / 1e9,
        paths={key: look_at_path(key, path, cfg.model.revision) for key, path in named_paths(cfg)},
    )


def main_memory(meminfo: Path = Path("/proc/meminfo")) -> tuple[float, float]:
    """This machine's memory, and how much of it programs may still get, in GB (10^9 bytes)."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if meminfo.is_file():
        available = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.MULTILINE)
        free = int(available[1]) * 1024 if available else total
    else:  # macOS: "Pages free: 9.", in pages whose size the first line says
        listed = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True, timeout=10).stdout
        pages = re.findall(r"^Pages (?:free|inactive|speculative): +(\d+)", listed, re.MULTILINE)
        size = re.search(r"page size of (\d+) bytes", listed)
        free = sum(map(int, pages)) * int(size[1]) if size else total
    return total / 1e9, free / 1e9


def versions() -> dict[str, str]:
    """Versions of software that should be the same on every node; "none" if it is not installed."""
    nccl, driver = "none", None
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    file = Path("/proc/driver/nvidia/version")
    if file.is_file():
        driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", file.read_text())
    numbers = {
        "phalanx": f"{__version__} (source {digest_path(Path(__file__).parents[2])[:6]})",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        "ROCm": torch.version.hip or "none",
        "NCCL": nccl,
        "NVIDIA driver": driver[0] if driver else "none",
    }
    return numbers | {name: version(name) for name in LIBRARIES}


def named_paths(cfg: CheckClusterConfig) -> Iterator[tuple[str, str]]:
    """The key and path of everything that a training job would read."""
    if cfg.model.path:
        yield "model.path", cfg.model.path
    for key, files in (("train_files", cfg.data.train_files), ("val_files", cfg.data.val_files)):
        for i, file in enumerate(files):
            if not file.startswith(SCHEME):  # each node would download it
                yield f"data.{key}[{i}]", file
    for i, function in enumerate(cfg.reward.functions):
        file = (function.path or "").partition(":")[0]
        if file.endswith(".py"):
            yield f"reward.functions[{i}].path", file


def look_at_path(key: str, path: str, revision: str | None = None) -> PathFact:
    """Open `path`: a diffusers model folder or hub id, a data file, or a folder of such files."""
    try:
        if key == "model.path":
            return look_at_model(path, revision)
        file = Path(path).expanduser()
        folder, colon, _ = path.rpartition(":")
        if colon and not file.exists():
            file = Path(folder).expanduser()  # folder:split
        return PathFact(path, bytes_below(file))
    except OSError as error:
        return PathFact(path, problem=f"{path}: {(error.strerror or str(error)).lower()}")
    except ValueError as error:
        return PathFact(path, problem=str(error).removeprefix(f"{key}: "))


def look_at_model(path: str, revision: str | None = None) -> PathFact:
    """Check that a model folder, or the cached copy of a hub model, is complete and readable."""
    index = model_index(path, revision)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        folder = Path(hf_hub_download(path, "model_index.json", revision=revision, local_files_only=True)).parent
        try:
            check_components(folder, index)
        except ValueError:
            return PathFact(path, here=False)
    size = bytes_below(folder / "model_index.json")
    for name, value in index.items():
        # [library, class] for a component, [null, null] for one that the pipeline lacks
        if isinstance(value, list) and value[0] is not None:
            size += bytes_below(folder / name)
    return PathFact(path, size)


def bytes_below(path: Path) -> int:
    """The size of a file, or of all files in a folder; opens each file, and raises OSError if that fails."""
    files = [path]
    if path.is_dir():
        files = []
        for root, _, names in os.walk(path, onerror=_raise_error):
            files += [Path(root, name) for name in names]
    size = 0
    for file in files:
        with file.open("rb") as content:
            content.read(1)
        size += file.stat().st_size
    return size


def _raise_error(error: OSError) -> NoReturn:
    raise error
