"""Placement of the reward model: the ranks that share it, the ranks whose images they score, and when they score."""

import re
from dataclasses import dataclass

from phalanx.config.messages import ConfigError, check_divides
from phalanx.config.reward import RewardModelConfig
from phalanx.config.run import RunConfig

_KEY = "reward.model.tensor_parallel_size"
_FORMS = "colocate, or ranks of each node such as ranks 6-7"


@dataclass(frozen=True)
class Domain:
    """`ranks` of one node whose images are scored together, and the `replicas` among them, each of which is a tuple of
    ranks that share one copy of the model.
    """

    ranks: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]


def place(config: RewardModelConfig, world_size: int, local_world_size: int) -> tuple[Domain, ...]:
    """Partition the world's ranks into domains. Raises ConfigError if nodes of this size cannot be divided so.

    `colocate`: each block of tensor_parallel_size neighbouring ranks is a domain and shares the model. `ranks a-b`:
    each node is a domain, and every tensor_parallel_size of its ranks a to b share one copy of the model.
    """
    tp, node = config.tensor_parallel_size, local_world_size
    if config.placement == "colocate":
        check_divides(_KEY, tp, node, "the {} ranks of a node")
        return tuple(Domain(block, (block,)) for block in _split_ranks(range(world_size), tp))
    bounds = re.fullmatch(r"ranks (\d+)-(\d+)", config.placement)
    if bounds is None:
        raise ConfigError(f"reward.model.placement: {config.placement!r}; expected {_FORMS}")
    first, last = int(bounds[1]), int(bounds[2])
    if not first <= last < node:
        raise ConfigError(f"reward.model.placement: {config.placement!r}: a node has ranks 0 to {node - 1} here")
    check_divides(_KEY, tp, last - first + 1, f"the {{}} ranks of reward.model.placement {config.placement!r}")
    return tuple(
        Domain(ranks, tuple(_split_ranks(range(ranks[0] + first, ranks[0] + last + 1), tp)))
        for ranks in _split_ranks(range(world_size), node)
    )


def judged_beside(cfg: RunConfig, shard_size: int) -> bool:
    """Whether the reward model scores on a thread while the policy samples, as reward.overlap requests.

    It does not if it is on all ranks, since none would sample meanwhile; if the rollout's engine is exclusive, like
    vLLM's, whose state is process-wide; or if both would use NCCL concurrently, which may deadlock: a reward model
    divided among ranks, and a policy whose weights are gathered in each forward pass.
    """
    model, gathered = cfg.reward.model, cfg.parallel.rollout_unsharded or shard_size == 1
    return (
        cfg.reward.overlap
        and model.placement != "colocate"
        and not cfg.rollout.facts.exclusive
        and (gathered or model.tensor_parallel_size == 1)
    )


def _split_ranks(ranks: range, size: int) -> list[tuple[int, ...]]:
    return [tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)]
