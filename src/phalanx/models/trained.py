"""A module that is trained, over the mesh: its LoRA, its reference, and other weights for it.

It knows nothing of what the module computes. A job may have several: a policy and a critic.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.config.run import ModelConfig, ParallelConfig
from phalanx.distributed.fsdp import Sharded, local
from phalanx.distributed.mesh import World
from phalanx.models.linear import prefers_onednn, use_onednn
from phalanx.models.lora import add_lora, lora_off, merged_weights


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
    ) -> None:
        """Add the LoRA that `config` asks for, compile `blocks` where it does, and shard them.

        `dtype` is what the module computes in; `lora_targets` the layers that get a LoRA unless
        `config` names others, whose weights are a function of `seed`. `frozen`: nothing is trained. `experts`: see
        Sharded.
        Raises ValueError for unknown layers.
        """
        self.module, self.world, self.config, self.dtype = module, world, config, dtype
        self.lora = config.lora_rank > 0
        module.eval()  # dropout would make a replay disagree with the rollout
        if self.lora:
            add_lora(module, config, lora_targets, seed)
        else:
            module.requires_grad_(not frozen)
        if config.compile:
            # block by block: those that are alike share one compilation
            for block in blocks:
                block.compile(fullgraph=True)
        elif world.device.type == "cpu" and prefers_onednn():
            use_onednn(module)
        self.sharded = Sharded(module, blocks, world, parallel, dtype, experts)
        self.parameters = self.sharded.parameters
        self._weights: dict[str, dict[str, Tensor]] = {}

    def unsharded(self) -> AbstractContextManager[None]:
        """A context in which all weights are gathered, for forward passes without gradients."""
        return self.sharded.unsharded()

    @torch.no_grad()
    def whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, one after the other, with the LoRA merged, for an engine's own copy.

        All ranks must draw all of them, in step; see merged_weights.
        """
        yield from merged_weights(self.module.state_dict(), self.config)

    def add_weights(self, name: str, values: dict[str, Tensor]) -> None:
        """Make `using(name)` possible: `values` are laid out as `parameters`."""
        self._weights[name] = values

    def keep_reference(self) -> None:
        """Keep the weights of now as the reference: nothing with LoRA, else a copy on the CPU.

        PiSSA takes its start out of the base, which is the reference no longer without it.
        """
        if self.lora and self.config.lora_init != "pissa":
            return  # `using` switches the LoRA off
        # of this rank's shards alone; on the CPU, as it is wanted once in a training step
        copies = {name: local(p).detach().cpu().clone() for name, p in self.parameters.items()}
        self.add_weights("reference", copies)

    def is_base(self, weights: str) -> bool:
        """True for the frozen weights alone, which are in place where the LoRA is off."""
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
