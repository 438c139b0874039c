"""A rank's state in the memory of another node, for jobs in which each shard is on one rank (trainer.peer_copy).

After each step every rank sends its parts to the rank with its local rank on the next node. That one keeps the last two
copies that arrived whole, in host memory: the newer one may never be complete, if a rank is lost while it is sent.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from phalanx.distributed.collectives import exchange_tensors, reduce_int
from phalanx.distributed.mesh import World

MESSAGE = 64 << 20  # bytes


class PeerCopy:
    """The copies that this rank keeps, as bytes in host memory: of each part one after another."""

    def __init__(self) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        self._of: list[tuple[int, int] | None] = [None, None]

    @property
    def copies(self) -> dict[tuple[int, int], Tensor]:
        """The bytes of whole copies, by step and shard."""
        return {of: memory for of, memory in zip(self._of, self._memory, strict=True) if of is not None}

    def keep(self, step: int | None) -> None:
        """Drop the copies of other steps, from which the job does not go on."""
        self._of = [of if of is not None and of[0] == step else None for of in self._of]

    @torch.no_grad()
    def update(self, parts: Sequence[Tensor], step: int, world: World) -> None:
        """Exchange the parts of the state after `step`. All ranks call this together."""
        distance = world.launch.local_world_size
        target, source = (world.rank + distance) % world.size, (world.rank - distance) % world.size
        size, coming = torch.tensor([sum(part.nbytes for part in parts)]), torch.zeros(1, dtype=torch.int64)
        exchange_tensors({target: size}, {source: coming})
        older = min((0, 1), key=lambda i: self._of[i] or (-1, -1))
        self._of[older], memory = None, self._memory[older]
        if len(memory) != coming:
            # allocated once: pages of new memory cost more than the copy
            memory = torch.empty(int(coming), dtype=torch.uint8, pin_memory=world.device.type == "cuda")
            self._memory[older] = memory
        _stream(parts, int(size), target, memory, source, world.device)
        # ranks that are lost so late are missed here, also where NCCL's groups were aborted, which raises no error
        reduce_int(0, "max")
        self._of[older] = step, source % world.shard_size


def _stream(parts: Sequence[Tensor], size: int, target: int, memory: Tensor, source: int, device: torch.device) -> None:
    """Send the bytes of `parts` to one rank while those of another one arrive in `memory`."""
    landing = torch.empty(0 if device.type == "cpu" else min(MESSAGE, len(memory)), dtype=torch.uint8, device=device)
    messages = _messages(parts, torch.empty(min(MESSAGE, size), dtype=torch.uint8, device=device))
    for start in range(0, max(size, len(memory)), MESSAGE):
        place = memory[start : start + MESSAGE]
        arriving = landing[: len(place)] if len(landing) else place
        sent = {target: next(messages)} if start < size else {}
        exchange_tensors(sent, {source: arriving} if len(place) else {})
        if arriving is not place:
            place.copy_(arriving, non_blocking=True)
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _messages(parts: Sequence[Tensor], buffer: Tensor) -> Iterator[Tensor]:
    """Yield the bytes of tensors in messages as long as `buffer`, which has each of them until the next one."""
    filled = 0
    for part in parts:
        left = as_bytes(part)
        while len(left):
            fits = min(len(left), len(buffer) - filled)
            buffer[filled : filled + fits].copy_(left[:fits])
            left, filled = left[fits:], filled + fits
            if filled == len(buffer):
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


def as_bytes(part: Tensor) -> Tensor:
    """A contiguous tensor's memory as uint8."""
    return part.detach().view(-1).view(torch.uint8)


def packed(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors, one after another, in host memory."""
    return torch.cat([torch.empty(0, dtype=torch.uint8), *(as_bytes(part).cpu() for part in parts)])


def unpack(memory: Tensor, parts: Sequence[Tensor]) -> None:
    """Fill `parts` with the bytes of tensors of the same shapes and dtypes. Raises ValueError for another size."""
    sizes = [part.nbytes for part in parts]
    if sum(sizes) != len(memory):
        raise ValueError(f"a copy of {len(memory)} bytes is not of {sum(sizes)} bytes of state")
    for part, value in zip(parts, memory.split(sizes), strict=True):
        as_bytes(part).copy_(value)
