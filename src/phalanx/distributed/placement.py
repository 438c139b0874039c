"""The places of the reward model in the world: which ranks hold it together, whose images they score, and when."""

import re
from dataclasses import dataclass

from phalanx.config import ConfigError
from phalanx.config.messages import near_divisors
from phalanx.config.reward import RewardModelConfig
from phalanx.config.run import RunConfig

_FORMS = "colocate, or ranks of each node such as ranks 6-7"


@dataclass(frozen=True)
class Domain:
    """`ranks` whose images are scored together, and the `replicas` among them: ranks that hold the model once together.

    A domain lies within one node.
    """

    ranks: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]


def place(config: RewardModelConfig, world_size: int, local_world_size: int) -> tuple[Domain, ...]:
    """The domains, which partition the world's ranks; ConfigError where nodes of this size do not divide so.

    `colocate`: each block of tensor_parallel_size neighbours is a domain and holds the model. `ranks a-b`: each node is
    a domain, and its ranks a to b hold the model, once for every tensor_parallel_size of them.
    """
    tp, node = config.tensor_parallel_size, local_world_size
    if config.placement == "colocate":
        _check_divides(tp, node, f"the {node} ranks of a node")
        return tuple(Domain(block, (block,)) for block in _blocks(range(world_size), tp))
    bounds = re.fullmatch(r"ranks (\d+)-(\d+)", config.placement)
    if bounds is None:
        raise ConfigError(f"reward.model.placement: {config.placement!r} should be {_FORMS}")
    first, last = int(bounds[1]), int(bounds[2])
    if not first <= last < node:
        raise ConfigError(f"reward.model.placement: {config.placement!r}: a node has ranks 0 to {node - 1} here")
    _check_divides(tp, last - first + 1, f"the {last - first + 1} ranks of reward.model.placement {config.placement!r}")
    return tuple(
        Domain(ranks, tuple(_blocks(range(ranks[0] + first, ranks[0] + last + 1), tp)))
        for ranks in _blocks(range(world_size), node)
    )


def judged_beside(cfg: RunConfig, shard_size: int) -> bool:
    """True where the reward model answers on a thread while the policy samples, as reward.overlap asks for.

    Not where it stands on all ranks, and nobody would sample meanwhile; nor where the rollout's engine is exclusive, as
    vLLM's are, whose state is one a process; nor where both would send over NCCL at a time, which may block: a model
    that is divided among ranks, and a policy whose weights are gathered in each forward pass.
    """
    model, gathered = cfg.reward.model, cfg.parallel.rollout_unsharded or shard_size == 1
    return (
        cfg.reward.overlap
        and model.placement != "colocate"
        and not cfg.rollout.facts.exclusive
        and (gathered or model.tensor_parallel_size == 1)
    )


def _blocks(ranks: range, size: int) -> list[tuple[int, ...]]:
    return [tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)]


def _check_divides(tp: int, ranks: int, holders: str) -> None:
    if ranks % tp:
        near = near_divisors(ranks, tp)
        raise ConfigError(
            f"reward.model.tensor_parallel_size: {tp} does not divide {holders}; nearest that does: {near}"
        )
