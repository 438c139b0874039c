"""Where a tensor would be: its storage carries a `Memory`, unless it is the host's ordinary memory."""

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from tests.pretended.streams import Memory

CPU = torch.device("cpu")
true_device = torch._C.TensorBase.device


def local(tensor: Tensor) -> Tensor:
    """The tensor that has memory: of a DTensor the local one."""
    while True:
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        elif isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        else:
            return tensor


def memory_of(tensor: Tensor) -> Memory | None:
    """What is known of a tensor's memory; None for the host's ordinary memory, and where there is no memory."""
    tensor = local(tensor)
    if true_device.__get__(tensor).type != "cpu" or not torch._C._has_storage(tensor):
        return None
    memory: Memory | None = vars(tensor.untyped_storage()).get("memory")
    return memory


def device_of(tensor: Tensor) -> torch.device:
    """The device that a tensor would be on."""
    memory = memory_of(tensor)
    return true_device.__get__(local(tensor)) if memory is None else memory.device


def put(tensor: Tensor, memory: Memory) -> Tensor:
    """Say where a tensor's memory is."""
    vars(local(tensor).untyped_storage())["memory"] = memory
    return tensor
