"""A module that is trained, over the mesh: its LoRA, its reference, and other weights for it.

It knows nothing of what the module computes. A job may have several: a policy and a critic.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from phalanx.config.run import ModelConfig, ParallelConfig
from phalanx.distributed.fsdp import Sharded, as_part_of, local
from phalanx.distributed.mesh import World
from phalanx.models.linear import ONEDNN, preferred, quantize_layers, unfuse_biases, use_onednn
from phalanx.models.lora import add_lora, lora_off, merged_weights
from phalanx.models.one_graph import OneGraph


@dataclass(frozen=True)
class Beside:
    """Modules of a trained one beside its blocks, such as a vision tower: its parts, of which `blocks` are sharded one
    by one. `frozen`: they are not trained, and whole on each rank, so that it can run them by itself.
    """

    parts: Sequence[nn.Module] = ()
    blocks: Sequence[nn.Module] = ()
    frozen: bool = False


class TrainedModel:
    """`module`, laid out over the mesh. The optimizer owns the tensors of `parameters`."""

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
        """Add the LoRA that `config` asks for, compile `blocks` where it does, and shard them.

        `dtype` is what the module computes in; `lora_targets` the layers that get a LoRA unless
        `config` names others, whose weights are a function of `seed`. `frozen`: nothing is trained; `part`: no more
        than this is, None: the module. `experts` and `kept`: see Sharded.
        Raises ValueError for unknown layers.
        """
        self.module, self.world, self.config, self.dtype = module, world, config, dtype
        self.lora = config.lora_rank > 0
        # fraction of the blocks that gradient checkpointing recomputes
        self.recomputed = config.recomputed(len(blocks)) / max(len(blocks), 1)
        module.eval()  # dropout would make a replay disagree with the rollout
        part = module if part is None else part
        module.requires_grad_(False)
        if self.lora:
            add_lora(part, config, lora_targets, seed)
        else:
            part.requires_grad_(not frozen)
        beside = beside or Beside()
        whole = beside.parts if beside.frozen else ()
        for part in whole:
            part.requires_grad_(False)
        if world.device.type == "cpu" and (config.cpu_linear or preferred()) == ONEDNN:
            use_onednn(module)
        self._one_graph: OneGraph | None = None
        if config.compile:
            unfuse_biases(module)
            self._one_graph = OneGraph(blocks)
        if config.quantization is not None:
            # a copy on the device is of whole weights only until FSDP has cut them
            quantize_layers(blocks, world.device, stays=world.shard_size == 1)
        units = [*beside.blocks, *blocks]
        self.sharded = Sharded(module, units, world, parallel, dtype, experts, kept, whole)
        self.parameters = self.sharded.parameters
        self._weights: dict[str, dict[str, Tensor]] = {}

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function` of `args`, which runs the module: rounded alike with gradients on and off.

        Not for decoding, which keeps what blocks compute.
        """
        return function(*args) if self._one_graph is None else self._one_graph(function, *args)

    def unsharded(self) -> AbstractContextManager[None]:
        """A context in which all weights are gathered, for forward passes without gradients."""
        return self.sharded.unsharded()

    @torch.no_grad()
    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, one after the other, with the LoRA merged, for an engine's own copy in the module's dtype.

        All ranks must draw all of them, in step; see merged_weights.
        """
        yield from merged_weights(self.module.state_dict(), self.config, self.dtype)

    @property
    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Of the trained tensors, whole."""
        return {name: (p.shape, p.dtype) for name, p in self.parameters.items()}

    @torch.no_grad()
    def whole(self, weights: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """The trained tensors, whole, one after the other, or other values of theirs (`add_weights`).

        All ranks must draw all of them, in step.
        """
        for name, p in self.parameters.items():
            value = p.detach() if weights is None else as_part_of(self._weights[weights][name].to(p.device), p)
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    @torch.no_grad()
    def take(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Put whole tensors in place of the trained ones, as `whole` gives them."""
        self.sharded.reshard()
        for name, value in values:
            p = self.parameters[name]
            if isinstance(p, DTensor):  # each rank has the whole and keeps its own part, without a message
                value = distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
            local(p).copy_(local(value))
        self.sharded.copy_to_module()

    def add_weights(self, name: str, values: dict[str, Tensor]) -> None:
        """Make `using(name)` possible: `values` are laid out as `parameters`."""
        self._weights[name] = values

    def keep_reference(self) -> None:
        """Keep the weights of now as the reference: nothing with LoRA, else a copy on the CPU.

        PiSSA takes its start out of the base, which is the reference no longer without it.
        """
        if self.lora and self.config.lora_init != "pissa":
            return  # `using` switches the LoRA off
        # only this rank's shards; on the CPU, as it is wanted once per training step
        copies = {name: local(p).detach().cpu().clone() for name, p in self.parameters.items()}
        self.add_weights("reference", copies)

    def is_base(self, weights: str) -> bool:
        """True for the frozen base, which is in place where the LoRA is off."""
        return weights == "reference" and self.lora and weights not in self._weights

    @contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """Other weights for a while: "reference", or those of `add_weights`; not within `unsharded`."""
        if self.is_base(weights):
            with lora_off(self.module):
                yield
            return
        # The values are swapped and the tensors stay: FSDP, the optimizer and compiled blocks hold
        # on to those.
        kept = {name: local(p).detach().clone() for name, p in self.parameters.items()}
        self._write(self._weights[weights])
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        # gathered weights would not show a change of their shards
        self.sharded.reshard()
        for name, p in self.parameters.items():
            local(p).copy_(local(values[name]))
        self.sharded.copy_to_module()
