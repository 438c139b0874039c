"""Expert parallelism over the shard axis: each rank keeps some experts of a layer; tokens are sent to them and back.

FSDP would gather all experts for every pass and keep their whole gradients between micro-batches. In a rollout, where
ranks do not run in step, the experts are gathered once, as FSDP does with all other weights.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from phalanx.distributed.context_parallel import SentRows
from phalanx.distributed.mesh import World


class SpreadExperts:
    """Shard the parameters of `module` by their first dim, the experts, into DTensors like those of FSDP.

    `parameters` are these DTensors. `tensors` are what the module computes with: [experts, ...] of this rank, or of all
    experts while they are `gathered`. Raises ValueError if the ranks do not divide the experts.
    """

    def __init__(
        self, module: nn.Module, world: World, dtype: torch.dtype, kept: Callable[[Tensor], torch.dtype]
    ) -> None:
        """dtype: dtype of the computation. kept: function from a parameter to the dtype in which it is stored."""
        self.module, self.mesh, self.dtype = module, world.mesh, dtype
        self.group = world.mesh.get_group("shard")
        self.gathered: dict[str, Tensor] | None = None
        place, size = world.mesh.get_local_rank("shard"), world.shard_size
        for name, p in list(module.named_parameters(recurse=False)):
            if len(p) % size:
                raise ValueError(
                    f"parallel.expert_parallel: the {size} ranks of parallel.fsdp_size do not divide a layer's "
                    f"{len(p)} experts"
                )
            part = p.detach().chunk(size)[place].to(world.device, kept(p), copy=True)
            whole = DTensor.from_local(part, world.mesh, [Replicate(), Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(whole, requires_grad=p.requires_grad))

    @property
    def parameters(self) -> dict[str, DTensor]:
        """The module's sharded parameters."""
        return {name: p for name, p in self.module.named_parameters(recurse=False) if isinstance(p, DTensor)}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors [experts, ...] to compute with, in the computation's dtype."""
        if self.gathered is not None:
            return self.gathered
        return {name: p.to_local().to(self.dtype) for name, p in self.parameters.items()}

    @torch.no_grad()
    def gather(self) -> None:
        """Gather all experts on each rank, until `release`."""
        gathered: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            part = p.to_local().to(self.dtype).contiguous()
            gathered[name] = part.new_empty(p.shape)
            dist.all_gather_into_tensor(gathered[name], part, group=self.group)
        self.gathered = gathered

    def release(self) -> None:
        """Free the gathered experts."""
        self.gathered = None

    def exchange(self, rows: Tensor, counts: Tensor) -> "Exchange":
        """Send rows [N, D], sorted by expert, to the ranks of their experts. counts: rows per expert, [experts]."""
        there = counts.view(dist.get_world_size(self.group), -1)
        here = torch.empty_like(there)
        dist.all_to_all_single(here, there, group=self.group)
        sizes = torch.stack([there.sum(1), here.sum(1)]).tolist()
        return Exchange(rows, here, sizes[0], sizes[1], self.group)

    def sum_gradients(self) -> None:
        """After the last backward pass: sum gradients over replicas. In each, one rank has those of an expert."""
        copies = self.mesh.get_group("replicate")
        for p in self.parameters.values():
            if not p.requires_grad:
                continue
            if p.grad is None:  # no token reached these experts
                p.grad = torch.zeros_like(p)
            if dist.get_world_size(copies) > 1:
                assert isinstance(p.grad, DTensor)
                dist.all_reduce(p.grad.to_local(), group=copies)


class Exchange:
    """Rows sent to this rank's experts: `rows`, sorted by expert; `counts` [experts], the number of rows per expert."""

    def __init__(
        self, rows: Tensor, counts: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup | None
    ) -> None:
        self.sent, self.received, self.group = sent, received, group
        arrived = SentRows.apply(rows, sent, received, group)
        # these are sorted by source rank, and within a source rank by expert
        experts = torch.arange(counts.shape[1], device=rows.device).repeat(len(counts))
        self.order = experts.repeat_interleave(counts.flatten(), output_size=sum(received)).argsort(stable=True)
        self.rows, self.counts = arrived[self.order], counts.sum(0)

    def back(self, rows: Tensor) -> Tensor:
        """Send the experts' outputs back to the ranks of their rows."""
        outputs = torch.empty_like(rows).index_copy(0, self.order, rows)
        returned: Tensor = SentRows.apply(outputs, self.received, self.sent, self.group)
        return returned
