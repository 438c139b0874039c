"""A LoRA in vLLM beside the weights of its base, handed over as tensors within the rank's process."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.engines.loading import listed

log = logging.getLogger(__name__)

MERGED = "%s: the LoRA is merged into vLLM's weights, because vLLM %s"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's buffers


@dataclass(frozen=True)
class Adapter:
    """A LoRA of this rank on `layers`, full names as in the model's files."""

    rank: int
    layers: Sequence[str]


def usable(adapter: Adapter | None, path: str, revision: str | None, dtype: str, key: str) -> Adapter | None:
    """The LoRA, unless it is known that vLLM cannot compute with it beside the model at `path`: then the reason is
    logged, with the configuration key, and it is merged.
    """
    if adapter is None:
        return None
    from vllm.config import ModelConfig
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.model_executor.models.interfaces import supports_lora

    model = get_model_cls(ModelConfig(model=path, revision=revision, trust_remote_code=False))
    reason = None
    if adapter.rank > RANKS[-1]:
        reason = f"takes no rank above {RANKS[-1]}"
    elif torch.cuda.is_available() and dtype == "float32":
        reason = "computes none in float32 on GPUs"
    elif not supports_lora(model):
        reason = f"takes none in {model.__name__}"
    elif "lm_head" in _layer_kinds(adapter):
        reason = "takes none on lm_head as transformers does"
    if reason is not None:
        log.warning(MERGED, key, reason)
    return adapter if reason is None else None


def served(model: Any, adapter: Adapter, key: str) -> bool:
    """Whether vLLM's `model` keeps a LoRA beside each of these layers; if not, it is logged."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager, mapper = model.lora_manager, _weights_mapper(model)
    known = set(manager.modules).union(*manager.packed_modules.values())
    lost = []
    for name in adapter.layers:
        if parse_fine_tuned_lora_name(f"{name}.lora_A.weight", mapper)[0] not in known:
            lost.append(name)
    if lost:
        log.warning(MERGED, key, f"takes none on {listed(lost)}")
    return not lost


def buffer_rank(rank: int) -> int:
    """The rank of vLLM's buffers for a LoRA; one above the largest is merged."""
    return next((size for size in RANKS if size >= rank), rank)


def lora_options(adapter: Adapter) -> dict[str, Any]:
    """Arguments of an engine with room for this LoRA, on its kinds of layers only."""
    rank = buffer_rank(adapter.rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": _layer_kinds(adapter)}


def put(model: Any, adapter: Adapter, tensors: dict[str, Tensor], number: int) -> None:
    """Let vLLM's `model` compute with these tensors, A and B times the scale by peft's names, as LoRA `number`."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager = model.lora_manager
    plain = PEFTHelper(r=adapter.rank, lora_alpha=adapter.rank, target_modules=[])  # B has been scaled already
    device = next(iter(tensors.values())).device
    lora = LoRAModel.from_lora_tensors(number, tensors, plain, device, weights_mapper=_weights_mapper(model))
    manager.remove_all_adapters()
    manager.add_adapter(lora)
    manager.activate_adapter(number)


def kept(model: Any, adapter: Adapter) -> Iterator[Tensor]:
    """The matrices A [rank, in] and B [out, rank] with which vLLM's `model` computes, as this rank's shards."""
    for module in model.lora_manager.modules.values():
        yield from (a[0, 0, : adapter.rank] for a in module.lora_a_stacked)
        yield from (b[0, 0, :, : adapter.rank] for b in module.lora_b_stacked)


def asking(number: int) -> Any:
    """With what a prompt asks vLLM for the LoRA that was `put` under this number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"policy {number}", number, "in memory")


def _layer_kinds(adapter: Adapter) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in adapter.layers})


def _weights_mapper(model: Any) -> Any:
    """vLLM's map from names in files to those of its modules, if they differ."""
    return model.hf_to_vllm_mapper.get_rename_mapper() if "hf_to_vllm_mapper" in dir(model) else None
