"""Optimizer state in host memory, copied to the device part by part for each update (parallel.optimizer_offload)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PART = 128 << 20  # bytes of state that are copied together; a parameter with more is a part by itself
SLOTS = 3  # parts on the device: one is copied back and one is fetched while the optimizer updates a third
_ALIGNED = 256  # alignment of tensors in bytes

State = dict[str, Any]


@dataclass
class _Moment:
    """A tensor of the state, `start` bytes after the beginning of its part."""

    state: State
    key: str
    shape: torch.Size
    dtype: torch.dtype
    start: int

    def place(self, part: Tensor) -> None:
        """Make the state's tensor a view of `part`, uint8 [bytes] on any device."""
        size = self.shape.numel() * self.dtype.itemsize
        memory = part[self.start : self.start + size]
        if memory.device.type == "cpu":
            # the same memory as a separate storage, since torch's stager copies whole storages and fails if the
            # local tensors of several DTensors share one; empty shards of uneven sharding have no memory
            memory = torch.from_numpy(memory.numpy()) if size > 0 else torch.empty_like(memory)
        self.state[self.key] = memory.view(self.dtype).view(self.shape)


@dataclass
class _Part:
    """Parameters, and their state in one permanent block of host memory."""

    parameters: list[Tensor] = field(default_factory=list)
    moments: list[_Moment] = field(default_factory=list)
    size: int = 0
    host: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def add(self, parameter: Tensor, state: State) -> None:
        self.parameters.append(parameter)
        for key, value in state.items():
            if value.dim() > 0:  # not the count of steps
                self.moments.append(_Moment(state, key, value.shape, value.dtype, self.size))
                self.size += value.nbytes + -value.nbytes % _ALIGNED

    def make(self, device: torch.device) -> None:
        """Allocate the state of parameters on `device`; for the meta device, without memory."""
        home, pin = "meta" if device.type == "meta" else "cpu", device.type == "cuda"
        # one block for all tensors, since torch rounds each block of pinned memory up to a power of two
        self.host = torch.zeros(self.size, dtype=torch.uint8, device=home, pin_memory=pin)
        self.place(self.host)

    def place(self, memory: Tensor) -> None:
        for moment in self.moments:
            moment.place(memory)


class OffloadedState:
    """The offloaded state of optimizers whose parameters are on one device."""

    def __init__(self, states: Iterable[tuple[Tensor, State]]) -> None:
        """states: the state of each parameter. Only the shapes and dtypes of its tensors are used: they are replaced by
        zeros in host memory, pinned for a GPU.
        """
        self._parts = [_Part()]
        for parameter, state in states:
            self._device = parameter.device
            size = sum(value.nbytes for value in state.values())
            if self._parts[-1].size > 0 and self._parts[-1].size + size > PART:
                self._parts.append(_Part())
            self._parts[-1].add(parameter, state)
        for part in self._parts:
            part.make(self._device)

    def visits(self) -> Iterator[list[Tensor]]:
        """Yield the parameters of each part while their state is on the device.

        The iterator must be exhausted; only then all state is back on the host.
        """
        accelerator = torch.get_device_module(self._device)  # streams and events of a CPU do nothing
        computing = accelerator.current_stream()
        coming, going = accelerator.Stream(), accelerator.Stream()
        # allocated for each update, so that activations can use the memory between updates
        largest = max(part.size for part in self._parts)
        slots = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in self._parts[:SLOTS]]
        for stream in (coming, going):
            stream.wait_stream(computing)  # earlier kernels may still use this memory
        fetched = [accelerator.Event() for _ in self._parts]
        updated = [accelerator.Event() for _ in self._parts]
        returned = [accelerator.Event() for _ in self._parts]

        def fetch(i: int) -> None:
            if i >= SLOTS:
                coming.wait_event(returned[i - SLOTS])
            with accelerator.stream(coming):
                self._on_device(slots, i).copy_(self._parts[i].host, non_blocking=True)
            fetched[i].record(coming)

        fetch(0)
        for i, part in enumerate(self._parts):
            if i + 1 < len(self._parts):
                fetch(i + 1)
            computing.wait_event(fetched[i])
            part.place(self._on_device(slots, i))
            yield part.parameters
            updated[i].record(computing)
            going.wait_event(updated[i])
            with accelerator.stream(going):
                part.host.copy_(self._on_device(slots, i), non_blocking=True)
            returned[i].record(going)
            part.place(part.host)
        returned[-1].synchronize()  # a checkpoint may read the host memory next
        # later kernels of the computing stream may reuse the slots' memory, but only after it was copied back
        computing.wait_stream(going)

    def _on_device(self, slots: list[Tensor], i: int) -> Tensor:
        return slots[i % SLOTS][: self._parts[i].size]
