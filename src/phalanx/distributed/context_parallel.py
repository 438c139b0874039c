"""Context parallelism: neighbouring ranks hold the same samples, and each a part of their tokens.

Around each attention they exchange tokens for heads (Ulysses, arXiv 2309.14509): in flow models by diffusers, in
language models by `ContextGroup`. Weights lie over all ranks as they do without it: a rank's gradient is the part that
comes from its own tokens, so the sum over all ranks is the whole one.
"""

from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.config.run import ParallelConfig

KEY = "parallel.ulysses_sequence_parallel_size"
T = TypeVar("T")


def context_mesh(config: ParallelConfig, ranks: int, device: torch.device) -> DeviceMesh | None:
    """The mesh (data, ring, ulysses) of all ranks, as diffusers wants it, without a ring; None where all ranks have
    different samples.
    """
    size = config.ulysses_sequence_parallel_size
    if size == 1:
        return None
    return init_device_mesh(device.type, (ranks // size, 1, size), mesh_dim_names=("data", "ring", "ulysses"))


def context_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """All groups of that mesh that are used, with the one that diffusers will ask for."""
    return [] if mesh is None else [*mesh.get_all_groups(), mesh["ring", "ulysses"]._flatten().get_group()]


@dataclass(frozen=True)
class ContextGroup:
    """The `size` ranks that hold the same samples, of which this one is number `place`."""

    group: dist.ProcessGroup
    size: int
    place: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """This rank's group in the mesh of `context_mesh`."""
        group = mesh["ulysses"].get_group()
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    def exchange(self, value: Tensor, split: int, join: int) -> Tensor:
        """Send each rank its part of `value` along the dim `split`; the parts that come are joined along `join`."""
        result: Tensor = _Exchange.apply(value, split, join, self)
        return result

    def gather(self, value: Tensor, dim: int) -> Tensor:
        """All ranks' values of one shape, joined along `dim`; a rank's gradient is that of its own part."""
        result: Tensor = _Gather.apply(value, dim, self)
        return result

    def objects(self, value: T) -> list[T]:
        """All ranks' values, which can be pickled."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out


class _Exchange(torch.autograd.Function):
    """The backward pass sends gradients the opposite way."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, split: int, join: int, context: ContextGroup) -> Tensor:
        ctx.split, ctx.join, ctx.context = split, join, context
        return _exchanged(value, split, join, context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grad, ctx.join, ctx.split, ctx.context), None, None, None


class _Gather(torch.autograd.Function):
    """The loss is the same on all ranks, and each takes the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, context: ContextGroup) -> Tensor:
        ctx.dim, ctx.context = dim, context
        parts = [torch.empty_like(value) for _ in range(context.size)]
        if not value.is_meta:  # those of a plan have only shapes
            dist.all_gather(parts, value.contiguous(), group=context.group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.context.size, ctx.dim)[ctx.context.place], None, None


def _exchanged(value: Tensor, split: int, join: int, context: ContextGroup) -> Tensor:
    """See ContextGroup.exchange."""
    parts = torch.stack(value.chunk(context.size, split))
    came = torch.empty_like(parts)
    if not parts.is_meta:
        dist.all_to_all_single(came, parts, group=context.group)
    return torch.cat(list(came), join)
