"""Parts of weights and gradients that a rank holds and sends: arithmetic over the units of phalanx.distributed.fsdp.

A policy on the meta device has such a layout, and a ledger. The ledger hears of the tensors that FSDP2 makes in the
passes of an update: gathered units, and gradients on their way to their parts.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx.config.run import ParallelConfig
from phalanx.distributed import mesh
from phalanx.distributed.launch import Launch
from phalanx.models.linear import NF4_BLOCK, NF4_BYTES
from phalanx.models.trained import TrainedModel
from phalanx.plan.ledger import Ledger

ROOT = -1  # the number of the unit that holds the parameters of no block
REDUCED = torch.float32.itemsize  # of the dtype in which gradients are summed over ranks


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal numbers of ranks, which are numbered node by node."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def launch(self) -> Launch:
        """The launch of its first rank."""
        return Launch(0, self.ranks, 0, self.per_node)

    def width(self, parallel: ParallelConfig) -> int:
        """Ranks that share a copy of the weights; ConfigError where it does not divide the world."""
        return mesh.shard_size(parallel, self.launch)

    def shard_groups(self, width: int) -> list[range]:
        """Ranks that share one copy of the weights, copy by copy."""
        return [range(first, first + width) for first in range(0, self.ranks, width)]

    def replicate_groups(self, width: int) -> list[range]:
        """Ranks that hold the same part of the weights, part by part."""
        return [range(part, self.ranks, width) for part in range(width)]

    def crosses(self, group: range) -> bool:
        """Whether a group has ranks of several nodes."""
        return group[0] // self.per_node != group[-1] // self.per_node


@dataclass(frozen=True)
class Weight:
    """A parameter that `width` ranks share; 1: each rank has all of it.

    `kept` is the dtype that a rank keeps it in. `unit` numbers the block that FSDP gathers it with, and is -1 for the
    root. `away`: FSDP's offload keeps it on the host, with its gradient, moments and average. `apart`: tokens travel to
    these experts in training, and only a rollout gathers them.
    """

    name: str
    shape: tuple[int, ...]
    kept: torch.dtype
    trained: bool
    width: int
    unit: int
    away: bool = False
    apart: bool = False

    @property
    def sharded(self) -> bool:
        return self.width > 1

    @property
    def travels(self) -> bool:
        """Whether an update gathers it, and reduces its gradient, with the others of its unit."""
        return self.sharded and not self.apart

    @property
    def lora(self) -> bool:
        return ".lora_" in self.name

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def quantized(self) -> bool:
        """Whether it is the bytes of a weight in NF4."""
        return self.kept is torch.uint8

    @property
    def count(self) -> int:
        """The number of weights."""
        return self.numel // NF4_BYTES * NF4_BLOCK if self.quantized else self.numel

    @property
    def part(self) -> int:
        """Elements on a rank: FSDP cuts the first dim and fills up the last part."""
        return -(-self.shape[0] // self.width) * math.prod(self.shape[1:]) if self.sharded else self.numel

    @property
    def gathered(self) -> int:
        return self.width * self.part


@dataclass(frozen=True)
class Layout:
    """All parameters of a model that computes in `dtype`; `width` ranks share one copy of what is sharded. Sizes are
    bytes on a rank.
    """

    weights: list[Weight]
    cluster: Cluster
    width: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        model: TrainedModel,
        blocks: Iterable[nn.Module],
        parallel: ParallelConfig,
        cluster: Cluster,
        whole: Iterable[Tensor] = (),
    ) -> "Layout":
        """The layout on a cluster of a model that one rank holds as a whole; these parameters are `whole` on each."""
        width, unshared = cluster.width(parallel), set(map(id, whole))
        named, parameters, weights = dict(model.module.named_parameters()), model.parameters, []
        units: dict[int, int] = {}
        for number, block in enumerate(blocks):
            units |= dict.fromkeys(map(id, block.parameters()), number)
        replicate = parallel.lora_sharding == "replicate" and len(parameters) < len(named)
        for name, p in named.items():
            trained = name in parameters
            kept = parameters[name].dtype if trained else p.dtype
            shared_by = 1 if (replicate and trained) or id(p) in unshared else width
            away = shared_by > 1 and parallel.param_offload
            apart = shared_by > 1 and parallel.expert_parallel and p.dim() == 3
            weights.append(Weight(name, tuple(p.shape), kept, trained, shared_by, units.get(id(p), -1), away, apart))
        return cls(weights, cluster, width, model.dtype)

    @property
    def trained(self) -> list[Weight]:
        """The weights that the optimizer changes."""
        return [w for w in self.weights if w.trained]

    def kept(self, weights: Iterable[Weight]) -> int:
        """Bytes of these on a rank between steps."""
        return sum(w.part * w.kept.itemsize for w in weights)

    def kept_on(self, *, host: bool) -> int:
        """Bytes of all weights between steps on a rank's device, or for it on the host."""
        return self.kept(w for w in self.weights if w.away == host)

    def copies(self) -> int:
        """Replicated weights in the dtype that the module computes in, beside those that the optimizer changes."""
        return sum(w.numel * self.dtype.itemsize for w in self.trained if not w.sharded and w.kept != self.dtype)

    def units(self) -> list[int]:
        """Each unit of FSDP while it is gathered: the blocks, and last the root."""
        totals = [0] * (max(w.unit for w in self.weights) + 2)
        for w in self.weights:
            if w.travels:
                sent = w.kept if w.quantized else self.dtype
                totals[w.unit] += w.gathered * sent.itemsize  # -1 is the last
        return totals

    def experts(self) -> int:
        """The experts that stay apart in training, gathered."""
        return sum(w.gathered for w in self.weights if w.apart) * self.dtype.itemsize

    def unsharded(self, *, throughout: bool) -> int:
        """Gathered weights: all of them `throughout`, or the root's, a block's and the message of the next block."""
        *blocks, root = self.units()
        return sum(blocks) + root if throughout else root + 2 * max(blocks)

    def stored(self) -> int:
        """The sharded weights that are trained, whole, in the dtype that they are kept in."""
        return sum(w.gathered * w.kept.itemsize for w in self.trained if w.sharded)

    def for_engine(self) -> int:
        """The sharded weights, whole, as they are gathered for an engine: only a LoRA with more bits than `dtype`."""
        total = 0
        for w in self.weights:
            size = w.kept.itemsize if w.lora else min(w.kept.itemsize, self.dtype.itemsize)
            total += w.gathered * size * w.sharded
        return total

    def gradient(self, w: Weight, *, summed: bool = False) -> int:
        """A gradient between passes: this rank's reduced part, or while passes are `summed`, the whole in float32."""
        return w.numel * REDUCED if w.travels and summed else w.part * w.kept.itemsize

    def message(self) -> int:
        """The gradients of replicated weights as one message."""
        return sum(w.numel for w in self.trained if not w.sharded) * REDUCED if self.cluster.ranks > 1 else 0

    def reduced(self) -> int:
        """The gradients of sharded weights as messages, whole."""
        return sum(w.gathered for w in self.trained if w.travels) * REDUCED

    def gathered_times(self, blocks: int, root: int) -> int:
        """Bytes of the weights where all blocks are gathered so many times, and the root so many times."""
        *sizes, last = self.units()
        return sum(sizes) * blocks + last * root


class CountedPolicy:
    """A base in front of FlowPolicy or LMPolicy, whose ledger hears of gathered weights and of copies of weights.

    `layout`: the weights on a rank of the cluster; `units`: what FSDP gathers one by one, the blocks behind those of a
    vision tower. `files`: the folder of the trained model's weights. `tokens`: length of a language model's longest
    sample, 0 for images. `encoders`, `decoders` and `components` of the pipeline, and `image_columns` of prompts,
    belong to flow models.
    """

    trained: TrainedModel
    config: Any
    ledger: Ledger
    layout: Layout
    blocks: list[nn.Module]
    units: list[nn.Module]
    files: Path
    tokens = 0
    encoders: Sequence[nn.Module] = ()
    decoders: Sequence[nn.Module] = ()
    components: Mapping[str, Any] = {}
    image_columns: Sequence[str] = ()

    def unsharded(self) -> AbstractContextManager[None]:
        """Count a round of forward passes that may share gathered weights."""
        self.ledger.phase.rounds += 1
        return self.trained.unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Note that the weights are copied, without a copy, which would be one of all weights."""
        if self.trained.is_base(weights):
            return self.trained.using(weights)
        self.ledger.phase.aside = True
        return nullcontext()


class ShardedUpdate:
    """The units of a policy whose weights are sharded by its layout, in the phase "update".

    FSDP2 gathers a unit into a flat message, copies that out into the unit's parameters, and frees both at certain
    times. The hooks here tell a ledger of the same bytes at the same times, since peaks of gathered weights, gradients
    and activations do not coincide.

    `summed`: gradients are added up over several passes, whole and in float32. The one pass that runs begins with all
    of these: it stands for the last one, which reduces them, or where there are more than two for one in the `middle`.
    With `parallel.sync_each_batch` each pass reduces them, and it is the parts that are added up.
    """

    def __init__(self, policy: CountedPolicy, parallel: ParallelConfig) -> None:
        self.ledger, self.layout, self.reshards = policy.ledger, policy.layout, parallel.reshard_after_forward
        self.summed, self.middle, self._each = False, True, parallel.sync_each_batch
        self._sizes = self.layout.units()
        self._weights: dict[int, list[Weight]] = defaultdict(list)
        for w in self.layout.trained:
            if w.travels:
                self._weights[w.unit].append(w)
        self._gathered: dict[str, int] = defaultdict(int)
        self._waiting: dict[int, int] = {}  # parameters of a unit that have no gradient yet in this backward pass
        self._computed: dict[int, int] = defaultdict(int)  # bytes of a unit's gradients that are not reduced yet
        self._backward = False
        self._unit: int | None = None  # the unit whose backward pass runs
        self._message = 0  # of the last reduction, which the next one frees
        for number, unit in [*enumerate(policy.units), (ROOT, policy.trained.module)]:
            unit.register_forward_pre_hook(partial(self._enter, number))
            unit.register_forward_hook(partial(self._leave, number))

    def begin(self) -> None:
        """Before a pass: nothing is gathered. Gradients that are summed are there as a whole, or as parts."""
        self.end()
        for w in self.layout.trained if self.summed else ():
            self.ledger.keep_gradient(self.layout.gradient(w, summed=not self._each))

    def add_gradient(self, w: Weight) -> None:
        """A gradient that autograd has computed, as FSDP2 keeps it until the backward pass of its unit ends."""
        if not w.travels:
            if not self.summed:
                self.ledger.keep_gradient(0 if w.away else self.layout.gradient(w))
            return
        size = w.numel * self.layout.dtype.itemsize
        self.ledger.keep_gradient(size)
        self._computed[w.unit] += size
        self._waiting[w.unit] -= 1
        if self._waiting[w.unit] == 0:
            self._reduce(w.unit)

    def _enter(self, number: int, module: nn.Module, args: Any) -> None:
        if self.ledger.phase.name != "update" or (self._backward and number != ROOT):  # or recomputed by checkpointing
            return
        if number == ROOT:
            self._free()
            self._waiting = {unit: len(weights) for unit, weights in self._weights.items()}
        size = self._sizes[number]
        self._hold("message", self._gathered["message"] + size)  # that of the unit before is there yet
        self._hold("message", size)
        self._hold(str(number), size)

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if self.ledger.phase.name != "update" or (self._backward and number != ROOT):
            return
        if number == ROOT:
            self._hold("message", 0)
            self._backward = True
        elif self.reshards:
            self._hold(str(number), 0)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._enter_backward, number))

    def _enter_backward(self, number: int, gradient: Tensor) -> None:
        if number == self._unit:
            return
        if self._unit is not None and self._unit != ROOT:
            self._reduce(self._unit)
        self._unit = number
        self._hold(str(number), self._sizes[number])  # copied out of the message
        before = len(self._sizes) - 2 if number == ROOT else number - 1
        self._hold("message", 0)
        if self.reshards and before >= 0:
            self._hold("message", self._sizes[before])

    def _reduce(self, number: int) -> None:
        """The end of a unit's backward pass: its weights are freed, and its gradients reduced to this rank's parts."""
        self._hold(str(number), 0)
        if number not in self._computed:
            return
        keep, weights = self.ledger.keep_gradient, self._weights[number]
        computed = self._computed.pop(number)
        if self.summed and not self._each:
            keep(-computed)
            if self.middle:  # added to those that are there as a whole
                return
            computed = sum(w.numel for w in weights) * REDUCED
        keep(-self._message)
        self._message = sum(w.gathered for w in weights) * REDUCED
        keep(self._message)  # filled from the gradients, which are there until then
        keep(-computed)
        keep(sum(w.part for w in weights) * REDUCED)
        kept = 0 if self.summed and self._each else 1  # of the parts, which may be added to those of other passes
        keep(sum(kept * self.layout.gradient(w) * (not w.away) - w.part * REDUCED for w in weights))

    def _hold(self, name: str, size: int) -> None:
        """Let `size` gathered bytes be there by this name, in place of those before."""
        self.ledger.gather(size - self._gathered[name])
        self._gathered[name] = size

    def end(self) -> None:
        """After an update: no gradients, and nothing is gathered."""
        self._free()
        self.ledger.keep_gradient(-self.ledger.gradients)
        self._message = 0
        self._computed.clear()

    def _free(self) -> None:
        for name in self._gathered:
            self._hold(name, 0)
        self._backward, self._unit = False, None
