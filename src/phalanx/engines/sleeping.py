"""A frozen model that occupies the device only while it is needed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Sleeping:
    """Keeps the weights in main memory, and a copy of them on the device while the model is awake.

    Frozen weights do not change and are not copied back; buffers, which are small and may change, are.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """`model` must be frozen and on the CPU; if `device` is a GPU, its weights move to pinned memory."""
        self._device, self._modules = device, list(model.modules())
        pin = device.type == "cuda"
        places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}  # tied weights have several places
        for module in self._modules:
            for name, weight in module.named_parameters(recurse=False):
                places.setdefault(weight, []).append((module, name))
        self._weights: list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = []
        while places:  # one by one, so that only one weight is in memory twice at a time
            weight, slots = places.popitem()
            weight = nn.Parameter(torch.empty_like(weight, pin_memory=pin).copy_(weight), requires_grad=False)
            self._weights.append((weight, slots))
            _set_weight(weight, slots)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the model on the device for the duration of the block."""
        try:
            for weight, slots in self._weights:
                _set_weight(nn.Parameter(weight.to(self._device, non_blocking=True), requires_grad=False), slots)
            self._move_buffers(self._device)
            yield
        finally:
            for weight, slots in self._weights:
                _set_weight(weight, slots)
            self._move_buffers(torch.device("cpu"))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _move_buffers(self, device: torch.device) -> None:
        for module in self._modules:
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))


def _set_weight(weight: nn.Parameter, slots: list[tuple[nn.Module, str]]) -> None:
    for module, name in slots:
        setattr(module, name, weight)
