"""Parts of weights and gradients that a rank holds and sends: arithmetic over the units of phalanx.distributed.fsdp.

A policy on the meta device has such a layout, and a ledger. The ledger hears of the tensors that FSDP2 allocates during
an update: gathered units, and gradients on their way to their parts.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from phalanx.config.parallel import ParallelConfig
from phalanx.config.run import RunConfig
from phalanx.distributed import mesh
from phalanx.distributed.launch_env import Launch
from phalanx.models.linear import NF4_BLOCK, NF4_BYTES
from phalanx.models.trained import Beside, TrainedModel
from phalanx.tools.plan.ledger import Ledger

ROOT = -1  # number of the unit that holds the parameters of no block
REDUCED = torch.float32.itemsize  # of the dtype in which gradients are summed over ranks
NOTHING = Beside()


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal numbers of ranks, which are numbered node by node. gpu_memory: bytes; None if unknown."""

    nodes: int
    per_node: int
    gpu_memory: int | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def launch(self) -> Launch:
        """The launch of its first rank."""
        return Launch(0, self.ranks, 0, self.per_node)

    def width(self, parallel: ParallelConfig) -> int:
        """Ranks that share a copy of the weights; ConfigError if it does not divide the world."""
        return mesh.shard_size(parallel, self.launch)

    def shard_groups(self, width: int) -> list[range]:
        """Ranks that share one copy of the weights, copy by copy."""
        return [range(first, first + width) for first in range(0, self.ranks, width)]


@dataclass(frozen=True)
class Weight:
    """A parameter that is sharded over `width` ranks; 1: each rank has all of it.

    kept: the dtype that a rank stores it in. unit: the number of the block that FSDP gathers it with, or ROOT. away:
    FSDP's offload keeps it on the host, with its gradient, moments and average. apart: an expert that tokens travel to
    in training, and that only a rollout gathers.
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
        """Whether an update gathers it and reduces its gradient, with the others of its unit."""
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
        """Elements on a rank: FSDP divides the first dim and pads the last part."""
        return -(-self.shape[0] // self.width) * math.prod(self.shape[1:]) if self.sharded else self.numel

    @property
    def gathered(self) -> int:
        """Elements of all parts."""
        return self.width * self.part


@dataclass(frozen=True)
class Layout:
    """All parameters of a model that computes in `dtype`; sharded ones have `width` parts. Sizes are a rank's bytes."""

    weights: list[Weight]
    cluster: Cluster
    width: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        model: TrainedModel,
        units: Iterable[nn.Module],
        parallel: ParallelConfig,
        cluster: Cluster,
        whole: Iterable[Tensor] = (),
    ) -> "Layout":
        """The layout on a cluster of a model that one rank holds entirely. whole: parameters that are not sharded."""
        width, unshared = cluster.width(parallel), set(map(id, whole))
        named, parameters, weights = dict(model.module.named_parameters()), model.parameters, []
        numbers: dict[int, int] = {}
        for number, unit in enumerate(units):
            numbers |= dict.fromkeys(map(id, unit.parameters()), number)
        replicate = parallel.lora_sharding == "replicate" and len(parameters) < len(named)
        for name, p in named.items():
            trained = name in parameters
            kept = parameters[name].dtype if trained else p.dtype
            shared_by = 1 if (replicate and trained) or id(p) in unshared else width
            away = shared_by > 1 and parallel.param_offload
            apart = shared_by > 1 and parallel.expert_parallel and p.dim() == 3
            unit_number = numbers.get(id(p), ROOT)
            weights.append(Weight(name, tuple(p.shape), kept, trained, shared_by, unit_number, away, apart))
        return cls(weights, cluster, width, model.dtype)

    @property
    def trained(self) -> list[Weight]:
        """The weights that the optimizer changes."""
        return [w for w in self.weights if w.trained]

    def kept(self, weights: Iterable[Weight]) -> int:
        """These weights on a rank between steps."""
        return sum(w.part * w.kept.itemsize for w in weights)

    def kept_on(self, *, host: bool) -> int:
        """All weights between steps on a rank's device, or those that it keeps on the host."""
        return self.kept(w for w in self.weights if w.away == host)

    def units(self) -> list[int]:
        """Each unit of FSDP while it is gathered: the blocks, and last the root."""
        totals = [0] * (max(w.unit for w in self.weights) + 2)
        for w in self.weights:
            if w.travels:
                sent = w.kept if w.quantized else self.dtype
                totals[w.unit] += w.gathered * sent.itemsize  # ROOT is the last index
        return totals

    def experts(self) -> int:
        """The experts that are not gathered in training, gathered."""
        return sum(w.gathered for w in self.weights if w.apart) * self.dtype.itemsize

    def unsharded(self, *, throughout: bool) -> int:
        """Gathered weights: all of them `throughout`, or those of the root, a block and the next block's message."""
        *blocks, root = self.units()
        return sum(blocks) + root if throughout else root + 2 * max(blocks)

    def for_engine(self) -> int:
        """The sharded weights, whole, as they are gathered for an engine: only a LoRA in a wider dtype than `dtype`."""
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
        """The weights if all blocks are gathered `blocks` times, and the root `root` times."""
        *sizes, last = self.units()
        return sum(sizes) * blocks + last * root


class CountedPolicy:
    """A base in front of FlowPolicy or LMPolicy, whose ledger hears of gathered weights and of copies of weights.

    layout: the weights on a rank of the cluster. units: modules that FSDP gathers one by one, the blocks of a vision
    tower and then `blocks`. tokens: length of a language model's longest sample, 0 for images. vision: a language
    model's vision tower. encoders, decoders and image_columns belong to flow models; mapped: the
    encoders whose weights are views of files.
    """

    trained: TrainedModel
    config: Any
    ledger: Ledger
    layout: Layout
    blocks: list[nn.Module]
    units: list[nn.Module]
    tokens = 0
    vision: Any = None
    encoders: Sequence[nn.Module] = ()
    mapped: Sequence[nn.Module] = ()
    decoders: Sequence[nn.Module] = ()
    image_columns: Sequence[str] = ()

    def lay_out(
        self, cfg: RunConfig, cluster: Cluster, ledger: Ledger, blocks: list[nn.Module], beside: Beside = NOTHING
    ) -> None:
        """Lay the weights out over the cluster, and count by this ledger."""
        self.trained.config = cfg.model  # PiSSA's reference is a copy
        self.ledger, self.blocks, self.units = ledger, blocks, [*beside.blocks, *blocks]
        whole = [p for part in beside.parts for p in part.parameters()] if beside.frozen else []
        self.layout = Layout.of(self.trained, self.units, cfg.parallel, cluster, whole)

    def unsharded(self) -> AbstractContextManager[None]:
        """Count a round of forward passes that may share gathered weights."""
        self.ledger.phase.rounds += 1
        return self.trained.unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Note that the weights are copied, without making the copy."""
        if self.trained.is_base(weights):
            return self.trained.using(weights)
        self.ledger.phase.aside = True
        return nullcontext()


class ShardedUpdate:
    """The units of a policy whose weights are sharded by its layout, in the phase "update".

    FSDP2 gathers a unit into a flat message, copies that out into the unit's parameters, and frees both at certain
    times. The hooks here tell a ledger of the same bytes at the same times, since the peaks of gathered weights,
    gradients and activations do not coincide.

    summed: gradients accumulate over several passes, whole and in float32. The one pass that runs begins with all of
    them: it stands for the last pass, which reduces them, or if there are more than two passes for one in the `middle`.
    With `parallel.sync_each_batch` each pass reduces its gradients, and their parts accumulate.
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
        self._waiting: dict[int, int] = {}  # parameters of a unit without a gradient in this backward pass
        self._computed: dict[int, int] = defaultdict(int)  # bytes of a unit's gradients before their reduction
        self._backward = False
        self._unit: int | None = None  # in its backward pass
        self._message = 0  # bytes of the last reduction's message, which the next one frees
        for number, unit in [*enumerate(policy.units), (ROOT, policy.trained.module)]:
            unit.register_forward_pre_hook(partial(self._enter_unit, number))
            unit.register_forward_hook(partial(self._leave_unit, number))

    def begin(self) -> None:
        """Begin a pass: nothing is gathered, and accumulated gradients exist as a whole or as parts."""
        self.end()
        for w in self.layout.trained if self.summed else ():
            self.ledger.keep_gradient(self.layout.gradient(w, summed=not self._each))

    def add_gradient(self, w: Weight) -> None:
        """Count a gradient that autograd has computed: FSDP2 keeps it until the backward pass of its unit ends."""
        if not w.travels:
            if not self.summed:
                self.ledger.keep_gradient(0 if w.away else self.layout.gradient(w))
            return
        size = w.numel * self.layout.dtype.itemsize
        self.ledger.keep_gradient(size)
        self._computed[w.unit] += size
        self._waiting[w.unit] -= 1
        if self._waiting[w.unit] == 0:
            self._reduce_gradients(w.unit)

    def _enter_unit(self, number: int, module: nn.Module, args: Any) -> None:
        if self.ledger.phase.name != "update" or (
            self._backward and number != ROOT
        ):  # the latter: checkpointing recomputes it
            return
        if number == ROOT:
            self._free_gathered()
            self._waiting = {unit: len(weights) for unit, weights in self._weights.items()}
        size = self._sizes[number]
        self._hold_bytes("message", self._gathered["message"] + size)  # that of the unit before still exists
        self._hold_bytes("message", size)
        self._hold_bytes(str(number), size)

    def _leave_unit(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        if self.ledger.phase.name != "update" or (self._backward and number != ROOT):
            return
        if number == ROOT:
            self._hold_bytes("message", 0)
            self._backward = True
        elif self.reshards:
            self._hold_bytes(str(number), 0)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._enter_backward, number))

    def _enter_backward(self, number: int, gradient: Tensor) -> None:
        if number == self._unit:
            return
        if self._unit is not None and self._unit != ROOT:
            self._reduce_gradients(self._unit)
        self._unit = number
        self._hold_bytes(str(number), self._sizes[number])  # copied out of the message
        before = len(self._sizes) - 2 if number == ROOT else number - 1
        self._hold_bytes("message", 0)
        if self.reshards and before >= 0:
            self._hold_bytes("message", self._sizes[before])

    def _reduce_gradients(self, number: int) -> None:
        """End a unit's backward pass: free its weights, and reduce its gradients to this rank's parts."""
        self._hold_bytes(str(number), 0)
        if number not in self._computed:
            return
        keep, weights = self.ledger.keep_gradient, self._weights[number]
        computed = self._computed.pop(number)
        if self.summed and not self._each:
            keep(-computed)
            if self.middle:  # they are added to the whole ones
                return
            computed = sum(w.numel for w in weights) * REDUCED
        keep(-self._message)
        self._message = sum(w.gathered for w in weights) * REDUCED
        keep(self._message)  # filled from the gradients, which exist until then
        keep(-computed)
        keep(sum(w.part for w in weights) * REDUCED)
        kept = 0 if self.summed and self._each else 1  # whether the parts stay, or are added to those of other passes
        keep(sum(kept * self.layout.gradient(w) * (not w.away) - w.part * REDUCED for w in weights))

    def _hold_bytes(self, name: str, size: int) -> None:
        """Replace the gathered bytes of this name by `size`."""
        self.ledger.gather(size - self._gathered[name])
        self._gathered[name] = size

    def end(self) -> None:
        """End an update: no gradients are left, and nothing is gathered."""
        self._free_gathered()
        self.ledger.keep_gradient(-self.ledger.gradients)
        self._message = 0
        self._computed.clear()

    def _free_gathered(self) -> None:
        for name in self._gathered:
            self._hold_bytes(name, 0)
        self._backward, self._unit = False, None
