"""A trained module, sharded over the mesh: its LoRA, its reference weights, and other weights to swap in.

It does not depend on what the module computes. A job may have several, such as a policy and a critic.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from phalanx.config.parallel import ParallelConfig
from phalanx.config.trained_model import ModelConfig
from phalanx.distributed.fsdp import Sharded, as_part_of, local
from phalanx.distributed.mesh import World
from phalanx.models.compiling import OneGraph
from phalanx.models.linear import DOWN, ONEDNN, UP, dequantized, preferred, quantize_layers, unfuse_biases, use_onednn
from phalanx.models.lora import add_lora, lora_alpha, lora_off
from phalanx.models.meeting import here, seeds


@dataclass(frozen=True)
class Beside:
    """Further modules within a trained module, such as a vision tower: `parts`, whose `blocks` are sharded one by one.

    frozen: they are not trained, and replicated on each rank, so that a rank can run them without the others.
    """

    parts: Sequence[nn.Module] = ()
    blocks: Sequence[nn.Module] = ()
    frozen: bool = False


class TrainedModel:
    """`module`, sharded over the mesh. The optimizer updates the tensors of `parameters`."""

    def __init__(
        self,
        module: Any,
        blocks: list[nn.Module],
        world: World,
        config: ModelConfig,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        *,
        lora_targets: Sequence[str] = (),
        seed: int,
        frozen: bool = False,
        experts: Sequence[nn.Module] = (),
        kept: torch.dtype | None = None,
        beside: Beside | None = None,
        part: nn.Module | None = None,
    ) -> None:
        """Add a LoRA, quantize and compile `blocks`, as `config` says, and shard them.

        dtype: that of the module's computation. lora_targets: default of model.target_modules. seed: that of the LoRA's
        weights. frozen: nothing is trained. experts, kept: see Sharded. part: the submodule that is trained; None: all.
        Raises ValueError for unknown layers.
        """
        self.module, self.world, self.config, self.dtype = module, world, config, dtype
        self.lora = config.lora_rank > 0
        self.adapter, self.shares = 0, False  # see with_adapters
        # fraction of the blocks that gradient checkpointing recomputes
        self.recomputed = config.recomputed(len(blocks)) / max(len(blocks), 1)
        module.eval()  # dropout would make a replay disagree with the rollout
        module.requires_grad_(False)
        part = module if part is None else part
        if self.lora:
            add_lora(part, config, lora_targets, seed)
        else:
            part.requires_grad_(not frozen)
        beside = beside or Beside()
        whole = beside.parts if beside.frozen else ()
        for frozen_part in whole:
            frozen_part.requires_grad_(False)
        if world.device.type == "cpu" and (config.cpu_linear or preferred()) == ONEDNN:
            use_onednn(module)
        self._one_graph: OneGraph | None = None
        if config.compile:
            unfuse_biases(module)
            self._one_graph = OneGraph(blocks)
        if config.quantization is not None:
            # when sharded, not left on the device: there they would be whole until FSDP shards them
            quantize_layers(blocks, world.device, stays=world.shard_size == 1)
        units, names = [*beside.blocks, *blocks], dict(zip(module.modules(), dict(module.named_modules()), strict=True))
        copies = [] if frozen or not self.lora else self._module_copies(names[part], lora_targets, seed)
        self.sharded = Sharded(module, units, world, parallel, dtype, experts, kept, whole)
        self._others: list[Sharded] = []  # of the copies
        for other in copies:
            twins = ([other.get_submodule(names[inner]) for inner in each] for each in (units, experts, whole))
            of_units, of_experts, of_whole = twins
            given = world, parallel, dtype, of_experts, kept, of_whole, self.sharded.frozen
            self._others.append(Sharded(other, of_units, *given))
        self.parameters = self.sharded.parameters
        self._weights: dict[str, dict[str, Tensor]] = {}

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(*args)`, which runs the module, with the same rounding with and without gradients.

        Not for decoding, which keeps outputs of blocks in a cache. In a sweep, jobs whose arguments have equal shapes
        except for their first dim, the rows of the batch, share a pass; the result has these rows first, too.
        """
        seat = here() if self.shares else None
        if seat is None:
            return self._run(function, *args)
        from phalanx.models.shared_base import form_of, together

        method = function.__func__ if isinstance(function, MethodType) else type(function)
        form = form_of(self.module, args)
        key = self.adapter if form is None else (method, form)
        return seat.ask(key, (self, function, args), together)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args) if self._one_graph is None else self._one_graph(function, *args)

    def backward(self, loss: Tensor) -> None:
        """The backward pass of a micro-batch; in a sweep, together with those of the other jobs."""
        seat = here() if self.shares else None
        if seat is None:
            loss.backward()
        else:
            seat.backward(loss)

    def _module_copies(self, part: str, targets: Sequence[str], seed: int) -> list[nn.Module]:
        """Copies of the module on the same base for the other jobs of a meeting; the LoRA of its `part` has `seed`."""
        from phalanx.models.shared_base import copy_beside, drawn_again

        copies = []
        for each in seeds()[1:]:
            copies.append(copy_beside(self.module))
            if each != seed:
                for name, value in drawn_again(self.module, part, self.config, targets, each):
                    copies[-1].get_parameter(name).data.copy_(value)
        return copies

    def with_adapters(self, *, shares: bool) -> "list[TrainedModel]":
        """The models of all jobs of a meeting, each with its own LoRA on the same frozen base. None has been trained.

        shares: whether they share passes, for functions that `run` calls with the batch as the first dim of all
        tensors, and of those that they return. Sharded LoRAs cannot.
        """
        from phalanx.models.shared_base import share_layers

        models, whole = [self], not any(isinstance(p, DTensor) for p in self.parameters.values())
        self.shares = shares and whole
        for adapter, sharded in enumerate(self._others, start=1):
            other = copy.copy(self)
            other.adapter, other._weights, other.module = adapter, {}, sharded.module
            other.sharded, other.parameters = sharded, sharded.parameters
            models.append(other)
        if whole:
            share_layers([model.module for model in models])
        for model in models if self.shares else ():
            # all of them may be within `unsharded` at once, each with a whole copy of the base
            model.sharded.config = replace(model.sharded.config, rollout_unsharded=False)
        return models

    def unsharded(self) -> AbstractContextManager[None]:
        """A context in which all weights are gathered, for forward passes without gradients."""
        return self.sharded.unsharded()

    @torch.no_grad()
    def whole_weights(self, *, base: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, with the LoRA merged, one full tensor at a time under the base model's names, for an
        engine's copy. All ranks must iterate in lockstep, to the end.

        Sharded tensors are gathered, in the module's dtype if that has fewer bits. Weights with a LoRA are summed, and
        yielded, in float32; those in NF4 are dequantized. base: leave the LoRA out.
        """
        state = self.module.state_dict()
        for name, tensor in state.items():
            stem = name.removesuffix("weight")
            if ".lora_" in name or name.endswith((f".{UP}", f".{DOWN}")):
                continue
            merged = name.endswith(".base_layer.weight") and not base
            if isinstance(tensor, DTensor) and tensor.dtype.itemsize > self.dtype.itemsize and not merged:
                tensor = tensor.to(self.dtype)
            weight = _full_tensor(tensor)
            if weight.dtype is torch.uint8:
                beside = [_full_tensor(state[stem + factor]) for factor in (UP, DOWN) if stem + factor in state]
                weight = dequantized(torch.float32 if merged else self.dtype, weight, *beside)
            if merged:
                owner = stem.removesuffix("base_layer.")
                down = _full_tensor(state[f"{owner}lora_A.default.weight"])
                up = _full_tensor(state[f"{owner}lora_B.default.weight"])
                # in float32: the receiver rounds the sum only once
                weight = weight.float() + self._lora_scale * (up.float() @ down.float())
            yield name.replace(".base_layer.", "."), weight

    @torch.no_grad()
    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA in float32, by peft's names, B times the scale. All ranks must iterate in lockstep."""
        for name, tensor in self.module.state_dict().items():
            if ".lora_" in name:
                factor = _full_tensor(tensor).float()
                yield name.replace(".default.", "."), factor * self._lora_scale if ".lora_B." in name else factor

    @property
    def _lora_scale(self) -> float:
        """By what B A is multiplied."""
        return lora_alpha(self.config) / self.config.lora_rank

    @property
    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Full (unsharded) shape and dtype of each trained tensor."""
        return {name: (p.shape, p.dtype) for name, p in self.parameters.items()}

    @torch.no_grad()
    def whole(self, weights: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors, one full tensor at a time; with `weights`, their values in this set of weights.

        All ranks must iterate in lockstep, to the end.
        """
        for name, p in self.parameters.items():
            value = p.detach() if weights is None else as_part_of(self._weights[weights][name].to(p.device), p)
            yield name, _full_tensor(value)

    @torch.no_grad()
    def take(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite the trained tensors by full tensors, as `whole` yields them."""
        self.sharded.reshard()
        for name, value in values:
            p = self.parameters[name]
            if isinstance(p, DTensor):  # each rank has the full tensor and keeps its shard, without communication
                value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
            local(p).copy_(local(value))
        self.sharded.copy_to_module()

    def add_weights(self, name: str, values: dict[str, Tensor]) -> None:
        """Add a set of weights for `using(name)`; `values` are sharded like `parameters`."""
        self._weights[name] = values

    def drop_weights(self, name: str) -> None:
        """Forget a set of weights of `add_weights`."""
        del self._weights[name]

    def local_copies(self, weights: str | None) -> list[Tensor]:
        """Copies of this rank's parts of a set of weights, see `whole`, in the order of `parameters`."""
        values = self.parameters if weights is None else self._weights[weights]
        return [local(values[name]).detach().clone() for name in self.parameters]

    def keep_reference(self) -> None:
        """Keep the current weights as the reference: a copy on the CPU, or with a LoRA just the base weights.

        PiSSA subtracts its initial LoRA from the base weights, so these alone are not the reference.
        """
        if self.lora and self.config.lora_init != "pissa":
            return  # `using` disables the LoRA
        # only this rank's shards, and on the CPU, because they are used once per training step
        copies = {name: local(p).detach().cpu().clone() for name, p in self.parameters.items()}
        self.add_weights("reference", copies)

    def is_base(self, weights: str) -> bool:
        """Whether these weights are the frozen base, which needs no copy: disabling the LoRA is enough."""
        return weights == "reference" and self.lora and weights not in self._weights

    @contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """A context with other weights: "reference", or a name given to `add_weights`. Not within `unsharded`."""
        if self.is_base(weights):
            with lora_off(self.module):
                yield
            return
        # Swap the values, not the tensors: FSDP, the optimizer and compiled blocks refer to the tensors.
        kept = {name: local(p).detach().clone() for name, p in self.parameters.items()}
        self._write_weights(self._weights[weights])
        try:
            yield
        finally:
            self._write_weights(kept)

    @torch.no_grad()
    def _write_weights(self, values: dict[str, Tensor]) -> None:
        # weights that stay gathered would not reflect a change of their shards
        self.sharded.reshard()
        for name, p in self.parameters.items():
            local(p).copy_(local(values[name]))
        self.sharded.copy_to_module()


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
