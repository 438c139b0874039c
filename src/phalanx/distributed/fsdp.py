"""The trained module over the mesh: sharded (FSDP2, HSDP) or replicated, one interface for both.

Gradients are summed over the world, never averaged (the loss's weights hold the denominator), in float32, once per
optimizer step. The optimizer owns float32 (or `lora_dtype`) values: sharded DTensors under FSDP; where the weights are
replicated, the module's own parameters or, if it computes in another dtype, float32 copies of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from phalanx.config.schema import ParallelConfig
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.mesh import World


class Sharded:
    """A module whose parameters are laid out over the mesh.

    `parameters` maps the name of each trained parameter to the tensor that the optimizer owns; `hidden_matrices` names
    those of two dims or more within the blocks.
    """

    def __init__(
        self, module: nn.Module, blocks: list[nn.Module], world: World, config: ParallelConfig, dtype: torch.dtype
    ) -> None:
        self.module, self.world, self.config = module, world, config
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._fsdp: list[FSDPModule] = []
        self._copies: dict[str, tuple[nn.Parameter, Tensor]] = {}
        if world.shard_size > 1:
            replicated = trained if config.lora_sharding == "replicate" and len(trained) < _count(module) else {}
            _fully_shard(module, blocks, world, config, dtype, set(replicated.values()))
            self._fsdp = [m for m in module.modules() if isinstance(m, FSDPModule)]
            trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        else:
            replicated = trained
            module.to(world.device)
        self._replicated = [trained[name] for name in replicated]
        self.parameters: dict[str, Tensor] = {}
        for name, p in trained.items():
            self.parameters[name] = self._own(name, p, dtype) if name in replicated else p
        blocks_of = {id(p) for block in blocks for p in block.parameters()}
        self.hidden_matrices = {name for name, p in trained.items() if id(p) in blocks_of and p.dim() >= 2}
        self.publish()

    def _own(self, name: str, p: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The optimizer's tensor of a replicated parameter; a float32 copy where the module computes in `dtype`."""
        p.data = p.data.to(self.world.device)
        if p.dtype == dtype:
            return p
        copy = p.data.detach().clone().requires_grad_()
        p.data = p.data.to(dtype)
        self._copies[name] = (p, copy)
        p.register_post_accumulate_grad_hook(lambda param: _accumulate(param, copy))
        return copy

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gather all weights once and keep them, for many forward passes without a gradient."""
        if not self._fsdp:
            yield
            return
        if not self.config.rollout_unsharded:
            try:
                yield
            finally:
                self.reshard()
            return
        root = self._fsdp[0]
        root.set_reshard_after_forward(False)
        for m in self._fsdp:
            m.unshard()
        try:
            yield
        finally:
            self._restore_resharding()
            self.reshard()

    def reshard(self) -> None:
        """Let go of gathered weights: a change of their shards would not show in them."""
        for m in self._fsdp:
            m.reshard()

    def _restore_resharding(self) -> None:
        for i, m in enumerate(self._fsdp):
            # the root is used at both ends of a forward pass, and its backward follows at once
            m.set_reshard_after_forward(self.config.reshard_after_forward and i > 0, recurse=False)

    def set_last_micro_batch(self, last: bool) -> None:
        """Before a backward pass: reduce gradients after this one only if it is the last of the optimizer step."""
        if self._fsdp:
            self._fsdp[0].set_requires_gradient_sync(last)
            self._fsdp[0].set_is_last_backward(last)

    def reduce_gradients(self) -> None:
        """After the last backward pass: sum replicated parameters' gradients over the world, in one float32 message."""
        if not self._replicated:
            return
        replicated = {id(p) for p in self._replicated}
        own = [t for name, t in self.parameters.items() if self._is_replicated(name, t, replicated)]
        for t in own:
            if t.grad is None:
                t.grad = torch.zeros_like(t)
        if self.world.size == 1:
            return
        flat = torch.cat([t.grad.float().flatten() for t in own if t.grad is not None])
        dist.all_reduce(flat)
        for t, part in zip(own, flat.split([t.numel() for t in own]), strict=True):
            assert t.grad is not None
            t.grad.copy_(part.view_as(t))

    def _is_replicated(self, name: str, tensor: Tensor, replicated: set[int]) -> bool:
        return name in self._copies or id(tensor) in replicated

    @torch.no_grad()
    def publish(self) -> None:
        """After the optimizer's tensors changed: show the module their values."""
        for p, copy in self._copies.values():
            p.copy_(copy)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """The norm of the whole gradient, which is scaled down to `max_norm` where it is larger (0: never)."""
        tensors = list(self.parameters.values())
        grads = [t.grad for t in tensors if t.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(tensors, max_norm, norm)
        return norm

    def finite(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether the gradient's norm and every rank's loss are finite; the same on all ranks."""
        bad = not bool(torch.isfinite(loss) & torch.isfinite(norm))
        return not (bad if self.world.size == 1 else reduce_int(bad, "max"))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part_of(part: Tensor, whole: Tensor) -> Tensor:
    """A local `part` as the DTensor that `whole` is (the same tensor where it is none), to save or to load."""
    if not isinstance(whole, DTensor):
        return part
    # DTensor.from_local would copy a part that is kept on the CPU to the mesh's device, and a load would fill the copy
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    return DTensor(part, DTensorSpec(whole.device_mesh, whole.placements, meta), requires_grad=False)


def _count(module: nn.Module) -> int:
    return sum(1 for _ in module.parameters())


@torch.no_grad()
def _accumulate(param: Tensor, copy: Tensor) -> None:
    assert param.grad is not None
    if copy.grad is None:
        copy.grad = param.grad.to(copy.dtype)
    else:
        copy.grad += param.grad
    param.grad = None


def _fully_shard(
    module: nn.Module,
    blocks: list[nn.Module],
    world: World,
    config: ParallelConfig,
    dtype: torch.dtype,
    ignored: set[nn.Parameter],
) -> None:
    """Shard blocks, then the root: one unit a block, LoRA matrices with the block that they belong to."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if config.param_offload else OffloadPolicy()
    for i, unit in enumerate([*blocks, module]):
        if not config.param_offload:
            unit.to(world.device)
        fully_shard(
            unit,
            mesh=world.mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=config.reshard_after_forward and i < len(blocks),
            ignored_params=ignored,
        )
    for m in module.modules():
        for name, buffer in m.named_buffers(recurse=False):
            setattr(m, name, buffer.to(world.device))  # offload is of parameters; buffers are used where they are
        if isinstance(m, FSDPModule):
            # sums, by a plain SUM: averaging belongs to the loss's weights, and gloo knows no other
            m.set_gradient_divide_factor(1.0)
            m.set_force_sum_reduction_for_comms(True)
