"""The weights that an engine gets of a module with a LoRA: all of them, or the LoRA alone."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.config.trained_model import ModelConfig
from phalanx.models.linear import DOWN, UP, dequantized
from phalanx.models.lora import lora_alpha


def merged_weights(
    state: dict[str, Tensor], config: ModelConfig, dtype: torch.dtype, *, base: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's state_dict with the LoRA merged, one full tensor at a time, under the base model's names.

    Sharded tensors are gathered, in `dtype` if that has fewer bits: all ranks of a shard group must iterate in
    lockstep, to the end. Weights with a LoRA are summed, and yielded, in float32; those in NF4 are dequantized.

    base: leave the LoRA out.
    """
    scale = _scale(config)
    for name, tensor in state.items():
        stem = name.removesuffix("weight")
        if ".lora_" in name or name.endswith((f".{UP}", f".{DOWN}")):
            continue
        merged = name.endswith(".base_layer.weight") and not base
        if isinstance(tensor, DTensor) and tensor.dtype.itemsize > dtype.itemsize and not merged:
            tensor = tensor.to(dtype)
        weight = _full_tensor(tensor)
        if weight.dtype is torch.uint8:
            beside = [_full_tensor(state[stem + factor]) for factor in (UP, DOWN) if stem + factor in state]
            weight = dequantized(torch.float32 if merged else dtype, weight, *beside)
        if merged:
            owner = stem.removesuffix("base_layer.")
            down = _full_tensor(state[f"{owner}lora_A.default.weight"])
            up = _full_tensor(state[f"{owner}lora_B.default.weight"])
            # in float32: the receiver rounds the sum only once
            weight = weight.float() + scale * (up.float() @ down.float())
        yield name.replace(".base_layer.", "."), weight


def adapter_weights(state: dict[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the LoRA in a module's state_dict, by peft's names, in float32 and with B times the scale. See
    merged_weights.
    """
    for name, tensor in state.items():
        if ".lora_" in name:
            factor = _full_tensor(tensor).float()
            yield name.replace(".default.", "."), factor * _scale(config) if ".lora_B." in name else factor


def _scale(config: ModelConfig) -> float:
    """By what B A is multiplied."""
    return lora_alpha(config) / config.lora_rank if config.lora_rank > 0 else 0.0


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
