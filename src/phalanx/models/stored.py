"""Weights that stay as their files hold them until they are laid out: views of mapped files, of which a rank reads the
parts that it keeps, and casts no more than these.
"""

from pathlib import Path

import torch
from torch import nn

from phalanx.models.headers import tensors

_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}  # of which float32 holds all values


def dtype_to_read(folder: Path, dtype: torch.dtype) -> torch.dtype:
    """The dtype to load a folder's *.safetensors in where parameters will be kept in `dtype`: the files' own where all
    tensors have that one and a cast loses nothing, else `dtype`.
    """
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        names |= {name for name, _ in tensors(file).values()}
    floats = {name for name in names if "F" in name}
    [name] = floats if len(floats) == 1 else [""]
    return _HALVES.get(name, dtype) if dtype is torch.float32 else dtype


def computes_alike(module: nn.Module) -> bool:
    """Whether all that a module made of its configuration, and not of files, is what it would have made in float32."""
    stored = module.state_dict()
    made = [buffer for name, buffer in module.named_buffers() if name not in stored]
    return all(buffer.dtype not in _HALVES.values() for buffer in made)


def widen_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the buffers that files gave, all of which every rank has."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.dtype in _HALVES.values():
                setattr(part, name, buffer.to(dtype))


def cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of layers, and neither buffers nor other tensors, such as the bias that a router chooses by.

    transformers keeps some of them in float32, such as a router's, and each version keeps others; FSDP would compute
    with them in `dtype` all the same, and an export would have weights of two dtypes.
    """
    for name, p in module.named_parameters():
        if name.endswith(".weight"):
            p.data = p.data.to(dtype)
