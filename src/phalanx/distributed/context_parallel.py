"""Context parallelism: neighbouring ranks share the same samples, with a part of their tokens on each rank.

Around each attention, they exchange tokens for heads (Ulysses, arXiv 2309.14509): diffusers does this for flow models,
`ContextGroup` for language models. Weights are distributed over all ranks as without it. A rank's gradient is the part
that comes from its tokens, so that the sum over all ranks is the whole gradient.
"""

from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import pad

from phalanx.config.parallel import ParallelConfig

KEY = "parallel.ulysses_sequence_parallel_size"
T = TypeVar("T")


def context_mesh(config: ParallelConfig, ranks: int, device: torch.device) -> DeviceMesh | None:
    """The mesh (data, ring, ulysses) of all ranks that diffusers expects, with a ring of size 1; None if all ranks have
    different samples.
    """
    size = config.ulysses_sequence_parallel_size
    if size == 1:
        return None
    return init_device_mesh(device.type, (ranks // size, 1, size), mesh_dim_names=("data", "ring", "ulysses"))


def context_groups(mesh: DeviceMesh | None) -> list[dist.ProcessGroup]:
    """All groups of that mesh that are used, including the flattened one that diffusers creates."""
    return [] if mesh is None else [*mesh.get_all_groups(), mesh["ring", "ulysses"]._flatten().get_group()]


@dataclass(frozen=True)
class ContextGroup:
    """The group of `size` ranks that share the same samples; `place` is this rank's number in it."""

    group: dist.ProcessGroup
    size: int
    place: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """This rank's group in the mesh of `context_mesh`."""
        group = mesh["ulysses"].get_group()
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    def part(self, value: Tensor, dim: int) -> Tensor:
        """This rank's part of `value` along `dim`, as long as those of all ranks, with zeros behind the end."""
        width = -(-value.shape[dim] // self.size)
        begin = min(self.place * width, value.shape[dim])
        part = value.narrow(dim, begin, min(width, value.shape[dim] - begin))
        missing = width - part.shape[dim]
        return pad(part, [0, 0] * (-dim - 1 if dim < 0 else value.dim() - 1 - dim) + [0, missing]) if missing else part

    def exchange(self, value: Tensor, split: int, join: int) -> Tensor:
        """Send each rank its part of `value` along dim `split`, and concatenate the received parts along dim `join`."""
        ones = [1] * self.size
        received: Tensor = SentRows.apply(torch.stack(value.chunk(self.size, split)), ones, ones, self.group)
        return torch.cat(list(received), join)

    def gather(self, value: Tensor, dim: int) -> Tensor:
        """Concatenate all ranks' values, of the same shape, along `dim`. A rank's gradient is that of its part."""
        result: Tensor = _Gather.apply(value, dim, self)
        return result

    def objects(self, value: T) -> list[T]:
        """Values of all ranks of the group, in rank order. They must be picklable."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out


class SentRows(torch.autograd.Function):
    """Send rows [N, ...] to the ranks of a group, `sent[i]` of them to rank i; the result has `received[i]` rows from
    each rank i. The backward pass sends gradients the opposite way.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output, rows = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
        if not rows.is_meta:  # meta tensors of a plan have no values
            dist.all_to_all_single(output, rows, received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return SentRows.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    """The loss is the same on all ranks, and each rank gets the gradient of its part."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int, context: ContextGroup) -> Tensor:
        ctx.dim, ctx.context = dim, context
        parts = [torch.empty_like(value) for _ in range(context.size)]
        if not value.is_meta:
            dist.all_gather(parts, value.contiguous(), group=context.group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.context.size, ctx.dim)[ctx.context.place], None, None
