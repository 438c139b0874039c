"""Copies between the host and a device, and within either."""

from typing import Any

import torch
from torch import Tensor

from tests.pretended import streams
from tests.pretended.places import CPU, device_of, memory_of, put
from tests.pretended.record import RECORD, caller
from tests.pretended.streams import HOST, Memory

true_to = Tensor.to


def transfer(source: Memory | None, target: Memory | None, size: int, late: bool) -> None:
    """Account for a copy of `size` bytes; None is the host's ordinary memory, `late` what torch calls non_blocking."""
    from_device = source is not None and source.device.type == "cuda"
    to_device = target is not None and target.device.type == "cuda"
    if not from_device and not to_device:
        if source is not None:
            source.host_reads()
        if target is not None:
            target.host_writes()
        return
    host = target if from_device else source
    pinned = host is not None and host.pinned
    # a copy from ordinary memory is staged before the call returns, and one to it is done by then
    waits = not late or (from_device and not pinned)
    if source is not None and (from_device or (pinned and not waits)):
        source.read()
    elif source is not None:
        source.host_reads()
    if target is not None:
        target.write()
    if from_device and to_device:
        return
    if RECORD.tape is not None:
        RECORD.fault("a copy between host and device within a graph")
    kind = f"{'device to host' if from_device else 'host to device'}{', pinned' if pinned else ''}"
    RECORD.copied[RECORD.phase, kind, caller()] += size
    if waits:
        RECORD.sync(f"copy, {kind}")
        HOST.follow(streams.current())


def moved(tensor: Tensor, device: torch.device, late: bool, **options: Any) -> Tensor:
    """A copy of a tensor on another device, with `options` of Tensor.to."""
    # torch makes what arrives late on the host in pinned memory
    memory = Memory(device) if device.type == "cuda" else Memory(CPU, pinned=late, asked=False)
    transfer(memory_of(tensor), memory, tensor.numel() * tensor.element_size(), late)
    with torch.utils._python_dispatch._disable_current_modes():
        copied = true_to(tensor, copy=True, **options)
    return put(copied, memory)


def whole(device: Any) -> torch.device:
    """A device with its index."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def to(
    tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None, late: bool, copy: bool, layout: Any = None
) -> Tensor:
    """Tensor.to, of parsed arguments."""
    options = {"dtype": dtype or tensor.dtype} | ({} if layout is None else {"memory_format": layout})
    now = device_of(tensor)
    if device is None or "meta" in (device.type, now.type):
        where = CPU if device is not None and device.type == "cuda" else device
        made = true_to(tensor, device=where, non_blocking=late, copy=copy, **options)
        return made if device is None or device.type != "cuda" else put(made, Memory(whole(device)))
    device = whole(device)
    if device == now:
        return true_to(tensor, copy=copy, **options)
    return moved(tensor, device, late, **options)
