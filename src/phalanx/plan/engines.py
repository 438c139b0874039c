"""Models beside the trained one: the reward model, and the transformer of a sampling engine.

No reward model is loaded: its size is in the headers of its files, or in their index.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from phalanx.config.reward import RewardModelConfig
from phalanx.config.run import RunConfig
from phalanx.distributed.placement import judged_beside
from phalanx.models.flow.policy import DTYPES
from phalanx.models.headers import read_json
from phalanx.plan.blueprint import fetch
from phalanx.plan.layout import Layout
from phalanx.plan.loading import Loading, loading

_COMPUTED_IN = ("F64", "F32", "F16", "BF16")  # as safetensors calls what is loaded in the dtype that is asked for
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class RewardModel:
    """The reward model on a rank that holds a part of it, in bytes.

    `weights`: that part; None where it is not known. `share`: memory that vLLM takes of the GPU while it scores, its
    cache included; None for other engines, and where the GPU is not known. On the device it has `held` throughout,
    `woken` more while it scores, and of that `while_sampling` while images are sampled. The host has `loading` of it
    while it is loaded, and `asleep` from then on. `folder` is where its size was found.
    """

    weights: int | None = None
    share: int | None = None
    held: int = 0
    woken: int = 0
    while_sampling: int = 0
    loading: Loading = field(default_factory=Loading)
    asleep: int = 0
    folder: str | None = None


def reward_model(cfg: RunConfig, gpu_memory: int | None, width: int) -> RewardModel | None:
    """The reward model of a job on GPUs of `gpu_memory` bytes (None: not known), `width` of which share the policy's
    weights; None for a job without one.

    Raises ValueError, with one line, for files that are damaged.
    """
    model = cfg.reward.model
    if model.path is None or not cfg.reward.functions:
        return None
    try:
        folder = fetch(model.path, model.revision, [_INDEX])  # of a hub id: what is in the cache, and the index
    except ValueError:
        folder = None
    whole = None if folder is None else _size(model, Path(folder))
    vllm = model.engine == "vllm"
    loads = Loading()
    if folder is not None and whole is not None and not vllm:  # vLLM loads to the device, a part at a time
        loads = loading(Path(folder), whole, DTYPES[model.dtype])
    weights = None if whole is None else -(-whole // model.tensor_parallel_size)
    share = int(gpu_memory * model.gpu_memory_utilization) if vllm and gpu_memory is not None else None
    awake = share if share is not None else weights or 0
    woken = awake if model.sleep else 0
    return RewardModel(
        weights=weights,
        share=share,
        held=awake - woken,
        woken=woken,
        while_sampling=woken if judged_beside(cfg, width) else 0,
        loading=loads,
        asleep=weights or 0 if model.sleep else 0,
        folder=folder,
    )


def engine_copy(cfg: RunConfig, layout: Layout) -> int:
    """Bytes of a sampling engine's copy of the model on a rank, the LoRA merged into it."""
    if cfg.rollout.facts.weights != "copy":
        return 0
    whole = sum(w.numel for w in layout.weights if not w.lora) * layout.dtype.itemsize
    return -(-whole // cfg.rollout.engine_memory.ranks)


def engine_share(cfg: RunConfig, gpu_memory: int | None, layout: Layout) -> int:
    """Bytes that an engine takes on the device while it samples: its share of the GPU, with the cache in it, where it
    reserves one.
    """
    reserved = 0 if gpu_memory is None else int(gpu_memory * cfg.rollout.engine_memory.reserved)
    return reserved or engine_copy(cfg, layout)


def _size(model: RewardModelConfig, folder: Path) -> int | None:
    """Bytes of all weights in the dtype that they are loaded in, or where only their index is within reach, in that of
    the files. None where neither is.
    """
    index: dict[str, Any] = {}
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX, "reward.model.path")
    files = _files(folder, index)
    if files and all(file.is_file() for file in files):
        wide = DTYPES[model.dtype].itemsize * 8
        return sum(_bits(file, wide) for file in files) // 8
    stored = index["metadata"] if "metadata" in index else {}
    return int(stored["total_size"]) if "total_size" in stored else None


def _files(folder: Path, index: dict[str, Any]) -> list[Path]:
    """Files that hold all weights; beside those of an index the folder may have the same weights in another form."""
    if index:
        return [folder / name for name in sorted(set(index["weight_map"].values()))]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _bits(file: Path, wide: int) -> int:
    """Bits of a file's weights, those that are computed in `wide` bits each; from its header."""
    bits = 0
    try:
        with safe_open(file, "pt") as header:
            for name in header.keys():  # noqa: SIM118 - it is no dict
                tensor = header.get_slice(name)
                kind = tensor.get_dtype()  # such as F16, U8, F8_E4M3 or BOOL
                digits = re.search(r"\d+", kind)
                stored = int(digits[0]) if digits is not None else 8
                bits += math.prod(tensor.get_shape()) * (wide if kind in _COMPUTED_IN else stored)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"reward.model.path: {file} is damaged or cut short: {error}") from None
    return bits
