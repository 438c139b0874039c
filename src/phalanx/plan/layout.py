"""Parts of weights and gradients that a rank holds and sends: arithmetic over the units of phalanx.distributed.fsdp."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from phalanx.config.run import ParallelConfig
from phalanx.distributed import mesh
from phalanx.distributed.launch import Launch
from phalanx.distributed.roles import Roles
from phalanx.models.trained import TrainedModel

REDUCED = torch.float32.itemsize  # of the dtype in which gradients are summed over ranks


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal numbers of ranks, which are numbered node by node."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.per_node

    @property
    def launch(self) -> Launch:
        """The launch of its first rank."""
        return Launch(0, self.ranks, 0, self.per_node)

    def of_role(self, roles: Roles, role: str) -> "Cluster":
        """The ranks of a role as the world that they see."""
        launch = roles.launch(role, self.launch)
        return Cluster(launch.world_size // launch.local_world_size, launch.local_world_size)

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
        """Whether a rank has only a part of it."""
        return self.width > 1

    @property
    def lora(self) -> bool:
        """Whether it belongs to a LoRA."""
        return ".lora_" in self.name

    @property
    def numel(self) -> int:
        """Elements of all of it."""
        return math.prod(self.shape)

    @property
    def part(self) -> int:
        """Elements on a rank: FSDP cuts the first dim and fills up the last part."""
        return -(-self.shape[0] // self.width) * math.prod(self.shape[1:]) if self.sharded else self.numel

    @property
    def gathered(self) -> int:
        """Elements of all parts."""
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
        cls, model: TrainedModel, blocks: Iterable[nn.Module], parallel: ParallelConfig, cluster: Cluster
    ) -> "Layout":
        """The layout on a cluster of a model that one rank holds as a whole."""
        width = cluster.width(parallel)
        named = dict(model.module.named_parameters())
        unit: dict[int, int] = {}
        for number, block in enumerate(blocks):
            unit |= dict.fromkeys(map(id, block.parameters()), number)
        parameters = model.parameters
        replicate = parallel.lora_sharding == "replicate" and len(parameters) < len(named)
        weights = []
        for name, p in named.items():
            trained = name in parameters
            kept = parameters[name].dtype if trained else p.dtype
            shared_by = 1 if replicate and trained else width
            number = unit.get(id(p), -1)
            away = shared_by > 1 and parallel.param_offload
            apart = shared_by > 1 and parallel.expert_parallel and p.dim() == 3
            weights.append(Weight(name, tuple(p.shape), kept, trained, shared_by, number, away, apart))
        return cls(weights, cluster, width, model.dtype)

    @property
    def trained(self) -> list[Weight]:
        """The weights that the optimizer changes."""
        return [w for w in self.weights if w.trained]

    def whole(self) -> int:
        """All weights as they are kept, of all ranks."""
        return sum(w.numel * w.kept.itemsize for w in self.weights)

    def kept(self, weights: Iterable[Weight]) -> int:
        """Bytes of these on a rank between steps."""
        return sum(w.part * w.kept.itemsize for w in weights)

    def here(self) -> int:
        """Bytes of all weights on a rank's device between steps."""
        return self.kept(w for w in self.weights if not w.away)

    def away(self) -> int:
        """Bytes of them on the host."""
        return self.kept(w for w in self.weights if w.away)

    def copies(self) -> int:
        """Replicated weights in the dtype that the module computes in, beside those that the optimizer changes."""
        return sum(w.numel * self.dtype.itemsize for w in self.trained if not w.sharded and w.kept != self.dtype)

    def units(self) -> list[int]:
        """Each unit of FSDP while it is gathered: the blocks, and last the root."""
        return [elements * self.dtype.itemsize for elements in self.by_unit(self.weights)]

    def experts(self) -> int:
        """The experts that stay apart in training, gathered."""
        return sum(w.gathered for w in self.weights if w.apart) * self.dtype.itemsize

    def unsharded(self, *, throughout: bool) -> int:
        """Gathered weights: all of them `throughout`, or the root's, a block's and the message of the next block."""
        *blocks, root = self.units()
        return sum(blocks) + root if throughout else root + 2 * max(blocks)

    def stored(self, *, trained: bool = False) -> int:
        """The sharded weights, whole, in the dtype that they are kept in; or of them those that are `trained`."""
        return sum(w.gathered * w.kept.itemsize for w in (self.trained if trained else self.weights) if w.sharded)

    def gradient(self, w: Weight, *, summed: bool = False) -> int:
        """A gradient between passes: this rank's reduced part, or while passes are `summed`, the whole in float32."""
        return w.numel * REDUCED if w.sharded and summed and not w.apart else w.part * w.kept.itemsize

    def message(self) -> int:
        """The gradients of replicated weights as one message."""
        return sum(w.numel for w in self.trained if not w.sharded) * REDUCED if self.cluster.ranks > 1 else 0

    def reduced(self) -> int:
        """The gradients of sharded weights as messages, whole."""
        return sum(self.by_unit(self.trained)) * REDUCED

    def gathered(self, passes: int, rounds: int, parallel: ParallelConfig) -> int:
        """Bytes of the weights that are gathered for forward passes without gradients: all weights once in each of the
        `rounds`, or the blocks in each pass and the root in each round.
        """
        *blocks, root = self.units()
        keep = parallel.rollout_unsharded or not parallel.reshard_after_forward
        experts = self.experts() if parallel.rollout_unsharded else 0
        return sum(blocks) * (rounds if keep else passes) + (root + experts) * rounds

    def gathered_to_train(self, micro_batches: int, passes: int, parallel: ParallelConfig) -> int:
        """The same of micro-batches with so many forward passes in all: backward passes gather the blocks again, and so
        does the second of two forward passes.
        """
        *blocks, root = self.units()
        again = passes if parallel.reshard_after_forward else 0
        return sum(blocks) * (micro_batches + again) + root * micro_batches

    def by_unit(self, weights: Iterable[Weight]) -> list[int]:
        """Elements of the sharded ones among these, by unit."""
        totals = [0] * (max(w.unit for w in self.weights) + 2)
        for w in weights:
            if w.sharded and not w.apart:
                totals[w.unit] += w.gathered  # -1 is the last
        return totals
