"""Weights that keep their files' dtype until they are sharded.

They are views of memory-mapped files, so that a rank reads and casts only the parts that it keeps.
"""

from pathlib import Path

import torch
from torch import nn

from phalanx.models.headers import tensors

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}  # a cast from these to float32 is exact


def dtype_to_read(folder: Path, dtype: torch.dtype) -> torch.dtype:
    """The dtype to load *.safetensors in for parameters of `dtype`: the files' if they share one that casts exactly."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        names |= {name for name, _ in tensors(file).values()}
    floats = {name for name in names if "F" in name}
    [name] = floats if len(floats) == 1 else [""]
    return _HALVES.get(name, dtype) if dtype is torch.float32 else dtype


def computes_alike(module: nn.Module) -> bool:
    """Whether buffers that the module computed, not loaded, are as they would be in float32: none is in 16 bits."""
    stored = module.state_dict()
    computed = [buffer for name, buffer in module.named_buffers() if name not in stored]
    return all(buffer.dtype not in _HALVES.values() for buffer in computed)


def widen_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the buffers that were loaded from files to `dtype`; they are not sharded."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.dtype in _HALVES.values():
                setattr(part, name, buffer.to(dtype))


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of layers to `dtype`, but not buffers or other tensors, such as a router's correction bias.

    transformers keeps some weights in float32, such as a router's, and which ones depends on the version. FSDP computes
    with them in `dtype` anyway, and an export would have weights of two dtypes.
    """
    for name, p in module.named_parameters():
        if name.endswith(".weight"):
            p.data = p.data.to(dtype)
