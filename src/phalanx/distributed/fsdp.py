"""The trained module on the mesh: sharded (FSDP2, HSDP) or replicated, with one interface for both.

Gradients are summed across all ranks, never averaged, in float32, once per optimizer step, or with
`parallel.sync_each_batch` per micro-batch within a shard group. The weights in the loss contain the global denominator,
so that the sum is the gradient of the whole batch in any layout.
The optimizer works on float32 (or `lora_dtype`) values: sharded DTensors under FSDP; for replicated weights, the
module's parameters or, if it computes in another dtype, float32 copies of them.

The order of calls in an optimizer step:

    for each micro-batch:
        set_last_micro_batch(last), forward, backward
    reduce_gradients, clip_gradients, finite, the optimizer's step, copy_to_module
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from phalanx.config.parallel import ParallelConfig
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.expert_parallel import SpreadExperts
from phalanx.distributed.mesh import World

# Frozen parts of modules that this process trained before it lost other ranks, for the same modules when loaded again.
KEPT: list[dict[str, Tensor]] = []


class Sharded:
    """A module whose parameters are distributed over the mesh.

    parameters: maps the name of each trained parameter to the tensor that the optimizer updates.
    hidden_matrices: names of the matrices and convolution kernels within the blocks, which Muon may update.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: list[nn.Module],
        world: World,
        config: ParallelConfig,
        dtype: torch.dtype,
        experts: Sequence[nn.Module] = (),
        kept: torch.dtype | None = None,
        whole: Sequence[nn.Module] = (),
        beside: dict[str, Tensor] | None = None,
    ) -> None:
        """Distribute `module` in place.

        dtype: dtype of the computation. experts: modules spread over the shard axis. kept: parameters with fewer bits
        are stored in this dtype; each rank casts only the part that it keeps. whole: frozen modules that stay unsharded
        on each rank. beside: `frozen` of another module with the same frozen weights; each rank keeps one shard of
        them. Raises ValueError if experts cannot be spread.
        """
        self.module, self.world, self.config, self._kept = module, world, config, kept
        self._units, self._beside = [*blocks, module], _take_kept(module) if beside is None else beside
        self._fsdp: list[FSDPModule] = []
        self._copies: dict[str, tuple[nn.Parameter, Tensor]] = {}
        if config.expert_parallel and world.shard_size > 1 and not experts:
            raise ValueError("parallel.expert_parallel: true needs a language model with experts; leave it out")
        self._spread = (
            [SpreadExperts(m, world, dtype, self._storage_dtype) for m in experts] if world.shard_size > 1 else []
        )
        for spread in self._spread:
            spread.module.spread = spread  # type: ignore[assignment]  # read by its forward
        trained = _trainable_parameters(module)
        unsharded = {p for part in whole for p in part.parameters()}
        for p in unsharded:
            p.data = p.data.to(world.device, dtype)
        if world.shard_size > 1:
            # LoRA matrices are small: if they are replicated, they need not be gathered, and one message per step sums
            # their gradients. A fully trained model is not small, so it is always sharded.
            has_frozen = len(trained) < len(list(module.parameters()))
            replicated = list(trained) if config.lora_sharding == "replicate" and has_frozen else []
            ignored: set[nn.Parameter] = {trained[name] for name in replicated} | unsharded
            for m in experts:
                ignored |= set(m.parameters(recurse=False))
            self._fully_shard(dtype, ignored)
            self._fsdp = [m for m in module.modules() if isinstance(m, FSDPModule)]
            trained = _trainable_parameters(module)  # fully_shard has replaced the parameters by DTensors
        else:
            replicated = list(trained)
            module.to(world.device)
            for p in module.parameters():
                if p not in unsharded:
                    p.data = p.data.to(self._storage_dtype(p))
            for name, same in (self._beside or {}).items():
                p = module.get_parameter(name)
                if not p.requires_grad and (same.shape, same.dtype) == (p.shape, p.dtype):
                    p.data = same
        self.parameters: dict[str, Tensor] = dict(trained)
        for name in replicated:
            self.parameters[name] = self._optimizer_tensor(name, trained[name], dtype)
        self._replicated = [self.parameters[name] for name in replicated]
        inner = {id(p) for block in blocks for p in block.parameters()}
        # a parameter of three dims is a stack of experts
        self.hidden_matrices = {name for name, p in trained.items() if p.dim() in (2, 4, 5) and id(p) in inner}
        self.copy_to_module()
        # this rank's parts; FSDP replaces the module's parameters while they are gathered
        self.frozen = {name: local(p.detach()) for name, p in module.named_parameters() if not p.requires_grad}

    def _fully_shard(self, dtype: torch.dtype, ignored: set[nn.Parameter]) -> None:
        """Shard the blocks, then the root. LoRA matrices are sharded with the block that contains them."""
        precision = MixedPrecisionPolicy(
            param_dtype=dtype,
            # a bfloat16 sum over many ranks would lose small gradients
            reduce_dtype=torch.float32,
            # A bfloat16 timestep has only three digits. The models cast their inputs themselves, as they must if the
            # weights are replicated and FSDP is not used.
            cast_forward_inputs=False,
        )
        offload = OffloadPolicy()
        if self.config.param_offload:
            # pinned memory lets copies to a GPU overlap with its computation
            offload = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
        # Inner modules first: fully_shard takes the parameters that no inner unit has taken, so the root gets those
        # outside the blocks. A unit is gathered as a whole. With one unit per block, the weights of about two blocks
        # are unsharded at a time: the block that computes and the next one, which is being gathered.
        names = {inner: f"{name}." if name else "" for name, inner in self.module.named_modules()}
        for unit in self._units:
            # FSDP expects whole parameters, but gets only their shapes. Then each rank reads its shards from the files,
            # of which the parameters are views.
            whole = self._take_out(unit, ignored)
            unit.register_forward_hook(_own_outputs)  # before FSDP's, which runs in the same order
            fully_shard(
                unit,
                mesh=self.world.mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=self.config.reshard_after_forward and unit is not self.module,
                ignored_params=ignored,
            )
            self._put_parts(unit, whole, names[unit])
        for m in self.module.modules():
            for name, buffer in m.named_buffers(recurse=False):
                # only parameters are offloaded; buffers must be on the device
                setattr(m, name, buffer.to(self.world.device))
            if isinstance(m, FSDPModule):
                # FSDP2 averages by default, but here the loss contains the denominator. Without the second call it
                # would sum with PREMUL_SUM(1.0), which gloo does not support.
                m.set_gradient_divide_factor(1.0)
                m.set_force_sum_reduction_for_comms(True)

    def _take_out(self, unit: nn.Module, ignored: set[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Replace a unit's parameters that are neither ignored nor sharded by meta tensors. Returns them by name."""
        whole = {}
        shapes: dict[nn.Parameter, nn.Parameter] = {}
        for name, p in list(unit.named_parameters(remove_duplicate=False)):
            if p in ignored or isinstance(p, DTensor):
                continue
            whole[name] = p
            if p not in shapes:
                shapes[p] = nn.Parameter(
                    torch.empty_like(p, device="meta", dtype=self._storage_dtype(p)), p.requires_grad
                )
            head, _, leaf = name.rpartition(".")
            setattr(unit.get_submodule(head), leaf, shapes[p])
        return whole

    def _put_parts(self, unit: nn.Module, whole: dict[str, nn.Parameter], prefix: str) -> None:
        """Fill the parameters of a sharded unit, which have no values yet, with this rank's parts of `whole`, or with
        those that exist already if they are frozen. prefix: of the unit's names in the module.
        """
        device = torch.device("cpu") if self.config.param_offload else self.world.device
        shards = self.world.mesh["shard"]
        place, size = shards.get_local_rank(), shards.size()
        made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters have several names
        parts = {}
        for name, p in whole.items():
            if p not in made:
                rows = -(-len(p) // size)
                part = p.detach()[place * rows : (place + 1) * rows]
                same = None if self._beside is None or p.requires_grad else self._beside.get(prefix + name)
                if same is not None and same.shape == part.shape and same.dtype == self._storage_dtype(p):
                    part = same
                else:
                    part = part.to(device, self._storage_dtype(p), copy=True)
                made[p] = nn.Parameter(as_part_of(part, unit.get_parameter(name)), p.requires_grad)
            parts[name] = made[p]
        unit.load_state_dict(parts, strict=False, assign=True)

    def _storage_dtype(self, p: Tensor) -> torch.dtype:
        """The dtype in which a parameter is stored."""
        if self._kept is None or p.dtype.itemsize >= self._kept.itemsize or not p.is_floating_point():
            return p.dtype
        return self._kept

    def _optimizer_tensor(self, name: str, p: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The optimizer's tensor for a replicated parameter: a copy if the parameter is not in `dtype`."""
        # FSDP neither moves nor casts ignored parameters
        p.data = p.data.to(self.world.device)
        if p.dtype == dtype:
            return p
        # The module computes in `dtype`. In bfloat16, an update by 1e-4 of a weight would vanish, and so would a small
        # gradient in a large sum. The copy keeps both in the parameter's original dtype, as FSDP does for shards.
        copy = p.data.detach().clone().requires_grad_()
        p.data = p.data.to(dtype)
        self._copies[name] = (p, copy)
        p.register_post_accumulate_grad_hook(lambda param: _accumulate_gradient(param, copy))
        return copy

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Within the block, gather all weights once and keep them, for many forward passes without gradients."""
        # A rollout calls the module dozens of times between two updates, and each call would gather every block again.
        # FSDP must be told not to free a block after its forward pass. Telling the root is enough, because this call
        # recurses; unshard() does not.
        gathered = self._fsdp if self.config.rollout_unsharded else []
        if gathered:
            gathered[0].set_reshard_after_forward(False)
        for m in gathered:
            m.unshard()
        for experts in self._spread if gathered else []:
            experts.gather()
        try:
            yield
        finally:
            for experts in self._spread:
                experts.release()
            for i, m in enumerate(gathered):
                # The root's weights (embeddings, the last layer) are used at both ends of a forward pass, and the
                # backward pass follows at once, so that freeing them would only make FSDP gather them again.
                m.set_reshard_after_forward(self.config.reshard_after_forward and i > 0, recurse=False)
            self.reshard()

    def reshard(self) -> None:
        """Free gathered weights, which would not follow a change of their shards."""
        for m in self._fsdp:
            m.reshard()

    def set_last_micro_batch(self, last: bool) -> None:
        """Before a backward pass: have it sum gradients over ranks if it is the last one of the optimizer step."""
        if self._fsdp:
            # Until then, each rank accumulates whole gradients, which takes more memory but one reduction per step, or
            # its shards of them after a reduction per pass. Replicas are summed once per step in either case.
            sync = last or self.config.sync_each_batch
            self._fsdp[0].set_requires_gradient_sync(sync)
            self._fsdp[0].set_requires_all_reduce(last)
            # a backward pass with reductions waits for them at its end
            self._fsdp[0].set_is_last_backward(sync)

    def reduce_gradients(self) -> None:
        """After the last backward pass: sum the gradients of replicated parameters across all ranks.

        FSDP has reduced those of sharded parameters within that backward pass.
        """
        for experts in self._spread:
            experts.sum_gradients()
        if not self._replicated:
            return
        # all ranks must send the same size, including parameters that a rank's samples did not use
        for t in self._replicated:
            t.grad = torch.zeros_like(t) if t.grad is None else t.grad
        if self.world.size == 1:
            return
        # one message, because each of hundreds of LoRA matrices would incur the network's latency
        gradients = [t.grad for t in self._replicated if t.grad is not None]
        flat = torch.cat([grad.float().flatten() for grad in gradients])
        dist.all_reduce(flat)
        for grad, part in zip(gradients, flat.split([grad.numel() for grad in gradients]), strict=True):
            grad.copy_(part.view_as(grad))

    @torch.no_grad()
    def copy_to_module(self) -> None:
        """After a change of the optimizer's tensors: copy their values into the module."""
        for p, copy in self._copies.values():
            p.copy_(copy)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale the gradient down to the norm `max_norm` if it is larger (0: never). Returns its norm before that."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not grads:
            return torch.zeros((), device=self.world.device)
        # On local parts: torch's functions for DTensors send a message for each tensor and take seconds of CPU time.
        parts = [local(grad) for grad in grads]
        norms = torch.stack(torch._foreach_norm(parts))
        if isinstance(grads[0], DTensor):  # then all of them are
            squares = norms**2
            dist.all_reduce(squares, group=self.world.mesh.get_group("shard"))
            norms = squares**0.5
        norm = torch.linalg.vector_norm(norms)
        if max_norm > 0:
            torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def finite(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether the gradient's norm and every rank's loss are finite; the same result on all ranks."""
        # The norm is the same on all ranks, but the loss is not. All must agree: if only one rank skipped an update,
        # its weights would differ from then on.
        bad = not bool(torch.isfinite(loss) & torch.isfinite(norm))
        return not (bad if self.world.size == 1 else reduce_int(bad, "max"))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part_of(part: Tensor, whole: Tensor) -> Tensor:
    """A local `part` as a DTensor like `whole`, to save or load; unchanged if `whole` is not a DTensor."""
    if not isinstance(whole, DTensor):
        return part
    # DTensor.from_local would copy a part in CPU memory to the mesh's device, and a load would fill only the copy
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    spec = DTensorSpec(whole.device_mesh, whole.placements, meta)
    return DTensor(part, spec, requires_grad=False)


def _take_kept(module: nn.Module) -> dict[str, Tensor] | None:
    """The parts of KEPT that belong to a module with these names."""
    names = {name for name, _ in module.named_parameters()}
    for parts in KEPT:
        if parts.keys() <= names:
            KEPT.remove(parts)
            return parts
    return None


def _trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def _accumulate_gradient(param: Tensor, copy: Tensor) -> None:
    """Move a micro-batch's gradient from a parameter to the optimizer's copy, where it is added in the copy's dtype."""
    assert param.grad is not None
    if copy.grad is None:
        copy.grad = param.grad.to(copy.dtype)
    else:
        copy.grad += param.grad
    param.grad = None


@torch.compiler.disable
def _own_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook that copies outputs that are views, such as FLUX's parts of a joint sequence.

    FSDP gathers a unit's weights for the backward pass in a hook of its output, which autograd drops from a view if
    something is added to it in place. torch warns of each view for that reason.
    """
    if isinstance(output, tuple):
        return tuple(_own_outputs(module, args, part) for part in output)
    if isinstance(output, Tensor) and output.requires_grad and output._base is not None:
        return output.clone()
    return output
