"""Which part of weights and gradients a rank holds: arithmetic over what phalanx.distributed.fsdp makes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from phalanx.config.run import ParallelConfig
from phalanx.models.flow.policy import FlowPolicy

REDUCED = torch.float32  # the dtype in which gradients are summed over ranks


@dataclass(frozen=True)
class Weight:
    """A parameter. `kept` is the dtype that a rank keeps it in; `unit` numbers the block that FSDP gathers it with, and
    is -1 for what is in no block.
    """

    name: str
    shape: tuple[int, ...]
    kept: torch.dtype
    trained: bool
    sharded: bool
    unit: int

    @property
    def numel(self) -> int:
        """Elements of all of it."""
        return math.prod(self.shape)

    def part(self, width: int) -> int:
        """Elements on a rank where `width` ranks share it: FSDP cuts the first dim and fills up the last part."""
        return -(-self.shape[0] // width) * math.prod(self.shape[1:]) if self.sharded else self.numel


@dataclass(frozen=True)
class Layout:
    """All parameters over `ranks` ranks, `width` of which share one copy of what is sharded. `dtype` is what the model
    computes in. Sizes are bytes on a rank.
    """

    weights: list[Weight]
    width: int
    ranks: int
    dtype: torch.dtype

    @classmethod
    def of(cls, policy: FlowPolicy, parallel: ParallelConfig, ranks: int, width: int) -> "Layout":
        """The layout of a policy that one rank holds as a whole, were it on `ranks` ranks."""
        named = dict(policy.model.transformer.named_parameters())
        unit = {id(p): i for i, block in enumerate(policy.model.blocks()) for p in block.parameters()}
        own = policy.trained.parameters
        replicate = parallel.lora_sharding == "replicate" and len(own) < len(named)
        weights = [
            Weight(
                name=name,
                shape=tuple(p.shape),
                kept=own[name].dtype if name in own else p.dtype,
                trained=name in own,
                sharded=width > 1 and not (replicate and name in own),
                unit=unit[id(p)] if id(p) in unit else -1,
            )
            for name, p in named.items()
        ]
        return cls(weights, width, ranks, policy.model.dtype)

    @property
    def trained(self) -> list[Weight]:
        """The weights that the optimizer changes."""
        return [w for w in self.weights if w.trained]

    def kept(self, weights: Iterable[Weight]) -> int:
        """What a rank keeps of these between steps."""
        return sum(w.part(self.width) * w.kept.itemsize for w in weights)

    def copies(self) -> int:
        """Replicated weights in the dtype that the module computes in, beside those that the optimizer changes."""
        return sum(w.numel * self.dtype.itemsize for w in self.trained if not w.sharded and w.kept != self.dtype)

    def units(self) -> list[int]:
        """Each unit of FSDP while it is gathered: the blocks, and last what is in none."""
        found = [w for w in self.weights if w.sharded]
        return self._by_unit((w, self.width * w.part(self.width) * self.dtype.itemsize) for w in found)

    def stored(self) -> int:
        """The sharded weights, whole, in the dtype that they are kept in."""
        return sum(self.width * w.part(self.width) * w.kept.itemsize for w in self.weights if w.sharded)

    def gradient(self, w: Weight, *, summed: bool = False) -> int:
        """What stays of a gradient: this rank's reduced part, or while passes are `summed`, the whole in float32."""
        if not w.sharded:
            return w.numel * w.kept.itemsize
        return w.numel * REDUCED.itemsize if summed else w.part(self.width) * w.kept.itemsize

    def reducing(self) -> int:
        """A unit's gradients on the way to their parts: as they were computed, and as the message."""
        found = [w for w in self.trained if w.sharded]
        each = self.dtype.itemsize + REDUCED.itemsize
        return max(self._by_unit((w, self.width * w.part(self.width) * each) for w in found))

    def message(self) -> int:
        """The gradients of replicated weights as one message."""
        return sum(w.numel for w in self.trained if not w.sharded) * REDUCED.itemsize if self.ranks > 1 else 0

    def reduced(self) -> int:
        """The gradients of sharded weights as messages of float32, whole."""
        return sum(self.width * w.part(self.width) for w in self.trained if w.sharded) * REDUCED.itemsize

    def gathered(self, passes: int, rounds: int, parallel: ParallelConfig) -> int:
        """Bytes of the weights that are gathered for forward passes without gradients: all weights once in each of the
        `rounds`, or the blocks in each pass and the root in each round.
        """
        units = self.units()
        if parallel.rollout_unsharded or not parallel.reshard_after_forward:
            return sum(units) * rounds
        return sum(units[:-1]) * passes + units[-1] * rounds

    def gathered_to_train(self, micro_batches: int, passes: int, parallel: ParallelConfig) -> int:
        """The same of micro-batches with so many forward passes in all: backward passes gather the blocks again, and so
        does the second of two forward passes.
        """
        units = self.units()
        again = sum(units[:-1]) * passes if parallel.reshard_after_forward else 0
        return sum(units) * micro_batches + again

    def _by_unit(self, sizes: Iterable[tuple[Weight, int]]) -> list[int]:
        totals = dict.fromkeys([*sorted({w.unit for w in self.weights} - {-1}), -1], 0)
        for w, size in sizes:
            totals[w.unit] += size
        return list(totals.values())


@dataclass(frozen=True)
class Cluster:
    """Nodes of equally many ranks, which are numbered node by node."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.per_node

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
class Traffic:
    """Bytes that a rank receives in a training step, and sends as many; `nodes`: through a group of several nodes."""

    what: str
    size: int
    nodes: bool


def traffic(layout: Layout, cluster: Cluster, gathered: Mapping[str, int], updates: int) -> list[Traffic]:
    """The messages of a training step of so many `updates` that are not negligible, each as a ring sends them.

    `gathered` are bytes of whole weights, by what they are for. Rings over n ranks: a gather of b bytes brings
    (n - 1) / n b to each rank, a reduce-scatter of b takes as much, an all-reduce both. What stays out are numbers:
    rewards, norms, and what is agreed on.
    """
    width = layout.width
    copies = cluster.ranks // width
    apart = any(map(cluster.crosses, cluster.shard_groups(width)))
    spread = any(map(cluster.crosses, cluster.replicate_groups(width)))
    reduced, message = layout.reduced() * updates, layout.message() * updates
    found = [
        *(Traffic(what, size * (width - 1) // width, apart) for what, size in gathered.items()),
        Traffic("gradients, reduced to their parts", reduced * (width - 1) // width, apart),
        Traffic("gradients, summed over copies", 2 * reduced // width * (copies - 1) // copies, spread),
        Traffic("gradients of replicated weights", 2 * message * (layout.ranks - 1) // layout.ranks, cluster.nodes > 1),
    ]
    return [item for item in found if item.size]
