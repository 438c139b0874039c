"""The optimizer's state on the host, which is copied to the device part by part (`parallel.optimizer_offload`)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

PART = 128 << 20  # bytes of state that travel together; a parameter with more is a separate part
SLOTS = 3  # parts on the device: one is written back and one is fetched while the optimizer works on a third
_ALIGNED = 256  # bytes: where a tensor may begin

State = dict[str, Any]


@dataclass
class _Moment:
    """A tensor of the state, `start` bytes behind the beginning of its part."""

    state: State
    key: str
    shape: torch.Size
    dtype: torch.dtype
    start: int

    def place(self, part: Tensor) -> None:
        """Let the state have it in `part`, uint8 [bytes], on whatever device that is."""
        size = self.shape.numel() * self.dtype.itemsize
        memory = part[self.start : self.start + size]
        if memory.device.type == "cpu":
            # over the same memory, but as a separate storage: torch's async_save stages whole storages, and fails where
            # the local tensors of several DTensors share one; an empty part of uneven shards has no memory
            memory = torch.from_numpy(memory.numpy()) if size > 0 else torch.empty_like(memory)
        self.state[self.key] = memory.view(self.dtype).view(self.shape)


@dataclass
class _Part:
    """Parameters, and their state in one block of the host's memory, which is there for good."""

    parameters: list[Tensor] = field(default_factory=list)
    moments: list[_Moment] = field(default_factory=list)
    size: int = 0
    host: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def add(self, parameter: Tensor, state: State) -> None:
        self.parameters.append(parameter)
        for key, value in state.items():
            if value.dim() > 0:  # AdamW keeps its count of steps on the CPU
                self.moments.append(_Moment(state, key, value.shape, value.dtype, self.size))
                self.size += value.nbytes + -value.nbytes % _ALIGNED

    def make(self, device: torch.device) -> None:
        """Of parameters on `device`: those of the meta device take no memory anywhere."""
        home, pin = "meta" if device.type == "meta" else "cpu", device.type == "cuda"
        # of all at once: torch rounds each block of pinned memory up to a power of two
        self.host = torch.zeros(self.size, dtype=torch.uint8, device=home, pin_memory=pin)
        self.place(self.host)

    def place(self, memory: Tensor) -> None:
        for moment in self.moments:
            moment.place(memory)


class OffloadedState:
    """The state of optimizers over parameters that are on one device."""

    def __init__(self, states: Iterable[tuple[Tensor, State]]) -> None:
        """`states` are those of each parameter, whose tensors only tell shapes and dtypes: zeros on the host take their
        places, pinned for a GPU.
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
        """The parameters of each part, whose state is on their device until the next part is asked for.

        The iterator must be exhausted: only then is all state back on the host.
        """
        accelerator = torch.get_device_module(self._device)  # of a CPU, streams and events do nothing
        computing = accelerator.current_stream()
        coming, going = accelerator.Stream(), accelerator.Stream()
        # made anew for each update: between updates, activations have the memory
        slots = [self._slot() for _ in self._parts[:SLOTS]]
        for stream in (coming, going):
            stream.wait_stream(computing)  # what had this memory before may still be in use
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
        returned[-1].synchronize()  # a checkpoint may read the host's memory next
        # the slots' memory is given back to the computing stream, whose later kernels must not write to it before
        computing.wait_stream(going)

    def _slot(self) -> Tensor:
        return torch.empty(max(part.size for part in self._parts), dtype=torch.uint8, device=self._device)

    def _on_device(self, slots: list[Tensor], i: int) -> Tensor:
        return slots[i % SLOTS][: self._parts[i].size]
