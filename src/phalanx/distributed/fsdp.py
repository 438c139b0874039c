"""The trained module over the mesh: sharded (FSDP2, HSDP) or replicated, one interface for both.

Gradients are summed across all ranks, never averaged, in float32, once per optimizer step, or with
`parallel.sync_each_batch` per micro-batch within a shard group: the loss's weights hold the global
denominator, so the sum is the whole batch's gradient in any layout.
The optimizer owns float32 (or `lora_dtype`) values: sharded DTensors under FSDP; where the weights
are replicated, the module's own parameters or, if it computes in another dtype, float32 copies.

The order of calls in an optimizer step:

    for each micro-batch:
        set_last_micro_batch(last), forward, backward
    reduce_gradients, clip_gradients, finite, the optimizer's own step, copy_to_module
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from phalanx.config.run import ParallelConfig
from phalanx.distributed.collectives import reduce_int
from phalanx.distributed.expert_parallel import SpreadExperts
from phalanx.distributed.mesh import World


class Sharded:
    """A module whose parameters are laid out over the mesh.

    `parameters` maps the name of each trained parameter to the tensor that the optimizer owns;
    `hidden_matrices` names the matrices and kernels within the blocks, which Muon may take.
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
    ) -> None:
        """`experts` are spread over the shard axis; frozen modules that are `whole` stay on each rank. Other parameters
        of fewer bits than `kept` are cast to it, by each rank the part that it keeps. Raises ValueError where experts
        cannot be spread.
        """
        self.module, self.world, self.config, self._kept = module, world, config, kept
        self._fsdp: list[FSDPModule] = []
        self._copies: dict[str, tuple[nn.Parameter, Tensor]] = {}
        if config.expert_parallel and world.shard_size > 1 and not experts:
            raise ValueError("parallel.expert_parallel: true needs a language model with experts; leave it out")
        self._spread = [SpreadExperts(m, world, dtype, self._dtype) for m in experts] if world.shard_size > 1 else []
        for spread in self._spread:
            spread.module.spread = spread  # type: ignore[assignment]  # read by its forward
        trained = _trained(module)
        unsharded = {p for part in whole for p in part.parameters()}
        for p in unsharded:
            p.data = p.data.to(world.device, dtype)
        if world.shard_size > 1:
            # LoRA matrices are small: replicated, they need no gathering, and one message per step sums their
            # gradients. A fully trained model is never small, so it is always sharded.
            has_frozen = len(trained) < len(list(module.parameters()))
            replicated = list(trained) if config.lora_sharding == "replicate" and has_frozen else []
            ignored: set[nn.Parameter] = {trained[name] for name in replicated} | unsharded
            for m in experts:
                ignored |= set(m.parameters(recurse=False))
            self._fully_shard(blocks, dtype, ignored)
            self._fsdp = [m for m in module.modules() if isinstance(m, FSDPModule)]
            trained = _trained(module)  # fully_shard has put DTensors in the parameters' place
        else:
            replicated = list(trained)
            module.to(world.device)
            for p in module.parameters():
                if p not in unsharded:
                    p.data = p.data.to(self._dtype(p))
        self.parameters: dict[str, Tensor] = dict(trained)
        for name in replicated:
            self.parameters[name] = self._own(name, trained[name], dtype)
        self._replicated = [self.parameters[name] for name in replicated]
        inner = {id(p) for block in blocks for p in block.parameters()}
        # three dims are experts, side by side
        self.hidden_matrices = {name for name, p in trained.items() if p.dim() in (2, 4, 5) and id(p) in inner}
        self.copy_to_module()

    def _fully_shard(self, blocks: list[nn.Module], dtype: torch.dtype, ignored: set[nn.Parameter]) -> None:
        """Shard the blocks, then the root; LoRA matrices belong to the block that they are in."""
        precision = MixedPrecisionPolicy(
            param_dtype=dtype,
            # in bfloat16, a sum over many ranks would lose the small ones
            reduce_dtype=torch.float32,
            # A timestep in bfloat16 has three digits left. The models cast what they want cast, as they
            # do where the weights are replicated and FSDP is not there to cast for them.
            cast_forward_inputs=False,
        )
        offload = OffloadPolicy()
        if self.config.param_offload:
            # pinned memory is what lets copies to a GPU run beside its computing
            offload = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
        # Inner modules first: fully_shard takes the parameters that no unit below has taken, so the
        # root gets what is outside the blocks. A unit is gathered as a whole; with one per block, about
        # two blocks' weights are whole at a time, one that computes and the next one on its way.
        for i, unit in enumerate([*blocks, self.module]):
            # FSDP expects whole parameters. It gets only their shapes, and each rank reads its shards from the files of
            # which the parameters are views.
            whole = self._take_out(unit, ignored)
            fully_shard(
                unit,
                mesh=self.world.mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=self.config.reshard_after_forward and i < len(blocks),
                ignored_params=ignored,
            )
            self._put_parts(unit, whole)
        for m in self.module.modules():
            for name, buffer in m.named_buffers(recurse=False):
                # only parameters are offloaded; a buffer is used where it is
                setattr(m, name, buffer.to(self.world.device))
            if isinstance(m, FSDPModule):
                # FSDP2 averages by default; here the loss's weights hold the denominator. Without the
                # second call it would sum by PREMUL_SUM(1.0), which gloo does not have.
                m.set_gradient_divide_factor(1.0)
                m.set_force_sum_reduction_for_comms(True)

    def _take_out(self, unit: nn.Module, ignored: set[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Replace a unit's parameters that are neither ignored nor sharded by shapes; returns them by name."""
        taken = {}
        shapes: dict[nn.Parameter, nn.Parameter] = {}
        for name, p in list(unit.named_parameters(remove_duplicate=False)):
            if p in ignored or isinstance(p, DTensor):
                continue
            taken[name] = p
            if p not in shapes:
                shapes[p] = nn.Parameter(torch.empty_like(p, device="meta", dtype=self._dtype(p)), p.requires_grad)
            head, _, leaf = name.rpartition(".")
            setattr(unit.get_submodule(head), leaf, shapes[p])
        return taken

    def _put_parts(self, unit: nn.Module, whole: dict[str, nn.Parameter]) -> None:
        """Give the parameters of a unit that is sharded, without values so far, this rank's part of theirs."""
        device = torch.device("cpu") if self.config.param_offload else self.world.device
        shards = self.world.mesh["shard"]
        place, size = shards.get_local_rank(), shards.size()
        made: dict[nn.Parameter, nn.Parameter] = {}  # a tied one has several names
        parts = {}
        for name, p in whole.items():
            if p not in made:
                rows = -(-len(p) // size)
                part = p.detach()[place * rows : (place + 1) * rows]
                part = part.to(device, self._dtype(p), copy=True)
                made[p] = nn.Parameter(as_part_of(part, unit.get_parameter(name)), p.requires_grad)
            parts[name] = made[p]
        unit.load_state_dict(parts, strict=False, assign=True)

    def _dtype(self, p: Tensor) -> torch.dtype:
        """The dtype in which a parameter is stored."""
        if self._kept is None or p.dtype.itemsize >= self._kept.itemsize or not p.is_floating_point():
            return p.dtype
        return self._kept

    def _own(self, name: str, p: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The optimizer's tensor of a replicated parameter: a copy where that is not in `dtype`."""
        # FSDP neither moves nor casts the parameters that it is told to ignore
        p.data = p.data.to(self.world.device)
        if p.dtype == dtype:
            return p
        # The module computes in `dtype`. In bfloat16 an update of 1e-4 of a weight would vanish,
        # and so would a small gradient in a sum of many: the copy holds both in the dtype that the
        # parameter came in, as FSDP does for shards.
        copy = p.data.detach().clone().requires_grad_()
        p.data = p.data.to(dtype)
        self._copies[name] = (p, copy)
        p.register_post_accumulate_grad_hook(lambda param: _accumulate(param, copy))
        return copy

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gather all weights once and keep them, for many forward passes without a gradient."""
        # A rollout calls the module dozens of times between two updates, and each call would gather every block anew.
        # FSDP frees a block after its forward pass, so it has to be told not to; setting the root is enough, as the
        # call recurses, while unshard() does not.
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
                # The root's own weights (embeddings, the last layer) are used at both ends of a forward pass, and its
                # backward follows at once: freeing them would only gather them again.
                m.set_reshard_after_forward(self.config.reshard_after_forward and i > 0, recurse=False)
            self.reshard()

    def reshard(self) -> None:
        """Free gathered weights: they would not follow a change of their shards."""
        for m in self._fsdp:
            m.reshard()

    def set_last_micro_batch(self, last: bool) -> None:
        """Before a backward pass: sum gradients over ranks if it is the last of the optimizer step."""
        if self._fsdp:
            # Until then each rank adds up whole gradients, which need more memory but one reduction per step, or the
            # parts that are left after a reduction per pass. Copies of the weights sum once in either case.
            sync = last or self.config.sync_each_batch
            self._fsdp[0].set_requires_gradient_sync(sync)
            self._fsdp[0].set_requires_all_reduce(last)
            # a backward pass waits for its reductions; the others have none to wait for
            self._fsdp[0].set_is_last_backward(sync)

    def reduce_gradients(self) -> None:
        """After the last backward pass: sum replicated parameters' gradients across all ranks.

        FSDP has reduced those of the shards within that backward pass.
        """
        for experts in self._spread:
            experts.sum_gradients()
        if not self._replicated:
            return
        # all ranks must send equally much, also for parameters that a rank's samples did not use
        for t in self._replicated:
            t.grad = torch.zeros_like(t) if t.grad is None else t.grad
        if self.world.size == 1:
            return
        # one message for all: hundreds of LoRA matrices would each pay the network's latency
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
        """The norm of the whole gradient, then scaled down to `max_norm` if above (0: never)."""
        tensors = list(self.parameters.values())
        grads = [t.grad for t in tensors if t.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        # of shards it is a DTensor, of which each rank has its own part until full_tensor
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(tensors, max_norm, norm)
        return norm

    def finite(self, loss: Tensor, norm: Tensor) -> bool:
        """True on all ranks where the gradient's norm and every rank's loss are finite."""
        # The norm is the same on all ranks, but the loss is not. All must agree: if only one rank skipped an update,
        # it would train other weights from then on.
        bad = not bool(torch.isfinite(loss) & torch.isfinite(norm))
        return not (bad if self.world.size == 1 else reduce_int(bad, "max"))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def as_part_of(part: Tensor, whole: Tensor) -> Tensor:
    """A local `part` as the DTensor that `whole` is, to save or load; unchanged if it is none."""
    if not isinstance(whole, DTensor):
        return part
    # DTensor.from_local would copy a part that is kept on the CPU to the mesh's device, and a load would fill the copy
    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    spec = DTensorSpec(whole.device_mesh, whole.placements, meta)
    return DTensor(part, spec, requires_grad=False)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def _accumulate(param: Tensor, copy: Tensor) -> None:
    """Add a micro-batch's gradient to that of the optimizer's copy, in the copy's dtype."""
    assert param.grad is not None
    if copy.grad is None:
        copy.grad = param.grad.to(copy.dtype)
    else:
        copy.grad += param.grad
    param.grad = None
