"""What stands beside the training's own model: the reward model, and the transformer of a sampling engine.

Of a reward model nothing is loaded: its size is in the headers of its files, or in their index.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from phalanx.config.flow import FlowRunConfig
from phalanx.config.run import RewardModelConfig
from phalanx.distributed.placement import judged_beside
from phalanx.models.flow.folder import read_json
from phalanx.models.flow.policy import DTYPES
from phalanx.plan.layout import Layout

_COMPUTED_IN = ("F64", "F32", "F16", "BF16")  # as safetensors calls what is loaded in the dtype that is asked for
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class RewardModel:
    """The reward model on a rank that holds a part of it, in bytes.

    `weights`: that part; None where it cannot be found out. `loading`: what the host has of it while it is loaded.
    `share`: what vLLM takes of the GPU while it scores, its cache included; None for other engines, and where the GPU
    is not known. `sleeps`: between scorings the weights are in the host's memory alone. `beside`: it answers while
    images are sampled.
    """

    weights: int | None
    loading: int
    share: int | None
    sleeps: bool
    beside: bool

    @property
    def awake(self) -> int:
        """Bytes on the device while it scores, as far as they are known."""
        return self.share if self.share is not None else self.weights or 0

    @property
    def held(self) -> int:
        """Bytes on the device between scorings."""
        return 0 if self.sleeps else self.awake

    @property
    def woken(self) -> int:
        """Bytes that come to the device when it wakes."""
        return self.awake - self.held

    @property
    def while_sampling(self) -> int:
        """Bytes of `woken` that are there while images are sampled."""
        return self.woken if self.beside else 0

    @property
    def asleep(self) -> int:
        """Bytes in the host's memory between scorings."""
        return self.weights or 0 if self.sleeps else 0


def reward_model(cfg: FlowRunConfig, gpu_memory: int | None, width: int) -> RewardModel | None:
    """The reward model of a job on GPUs of `gpu_memory` bytes (None: not known), `width` of which share the policy's
    weights; None for a job without one.

    Raises ValueError, with one line, for files that are damaged.
    """
    model = cfg.reward.model
    if model.path is None or not cfg.reward.functions:
        return None
    whole, vllm = _size(model), model.engine == "vllm"
    return RewardModel(
        weights=None if whole is None else -(-whole // model.tensor_parallel_size),
        loading=0 if vllm else whole or 0,  # vLLM loads to the device, a part at a time
        share=int(gpu_memory * model.gpu_memory_utilization) if vllm and gpu_memory is not None else None,
        sleeps=model.sleep,
        beside=judged_beside(cfg, width),
    )


def engine_copy(cfg: FlowRunConfig, layout: Layout) -> int:
    """Bytes of the transformer that a sampling engine holds for itself: whole, the LoRA merged into it."""
    if cfg.rollout.engine != "vllm_omni":
        return 0
    return sum(w.numel for w in layout.weights if ".lora_" not in w.name) * layout.dtype.itemsize


def _size(model: RewardModelConfig) -> int | None:
    """Bytes of all weights in the dtype that they are loaded in, or where only their index is within reach, that they
    are stored in. None where that is not either.
    """
    assert model.path is not None
    folder = _folder(model.path)
    if folder is None:
        return None
    index = folder / _INDEX
    content = read_json(index, "reward.model.path") if index.is_file() else None
    files = _files(folder, content)
    if files is not None:
        wide = DTYPES[model.dtype].itemsize * 8
        elements = _elements(files)
        return sum(count * (wide if kind in _COMPUTED_IN else _bits(kind)) for kind, count in elements.items()) // 8
    stored = content["metadata"] if content is not None and "metadata" in content else {}
    return int(stored["total_size"]) if "total_size" in stored else None


def _folder(path: str) -> Path | None:
    """The model's folder. Of a hub id it holds what is in the cache, and the index."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(path, allow_patterns=[_INDEX]))
    except (HFValidationError, OSError):
        return None


def _files(folder: Path, index: Any) -> list[Path] | None:
    """The files of all weights; None where one is missing, or there are none."""
    single = folder / "model.safetensors"
    if index is not None:  # beside these there may be the same weights in another form
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    else:
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    return files if files and all(file.is_file() for file in files) else None


def _elements(files: list[Path]) -> Counter[str]:
    """Elements by their dtype, as safetensors calls it, from the headers of files."""
    found: Counter[str] = Counter()
    for file in files:
        try:
            with safe_open(file, "pt") as headers:
                for name in headers.keys():  # noqa: SIM118 - it is no dict
                    tensor = headers.get_slice(name)
                    found[tensor.get_dtype()] += math.prod(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"reward.model.path: {file} is damaged or cut short: {error}") from None
    return found


def _bits(kind: str) -> int:
    """Of an element of a dtype such as U8, F8_E4M3 or BOOL."""
    found = re.search(r"\d+", kind)
    return int(found[0]) if found is not None else 8
