"""The messages of a training step: bytes that a rank receives, and sends as many."""

from dataclasses import dataclass

from phalanx.distributed.roles import ACTOR, ROLLOUT
from phalanx.plan.phases import kinds
from phalanx.plan.rehearsal import Planned


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives in a training step; `nodes`: through a group of several nodes."""

    what: str
    size: int
    nodes: bool


def messages(p: Planned) -> list[Traffic]:
    """The messages of a planned job that are not negligible, each as a ring sends them.

    Rings over n ranks: a gather of b bytes brings (n - 1) / n b to each rank, a reduce-scatter of b takes as much, an
    all-reduce both. Single numbers, such as rewards and norms, are left out.
    """
    layout, parallel, phases = p.policy.layout, p.cfg.parallel, p.ledger.phases
    engine = p.cfg.rollout.facts.weights == "copy" and p.role in ("", ROLLOUT)
    gathered = {"weights, gathered for the engine": layout.stored() * engine}  # bytes of whole weights
    if p.role == ACTOR:
        gathered["weights, gathered for other roles"] = layout.stored(trained=True)
    for kind in kinds(p.frozen):
        if not kind.message or kind.name not in phases:
            continue
        phase = phases[kind.name]
        if kind.name == "update":
            size = layout.gathered_to_train(p.state.micro_batches, phase.passes, parallel)
        else:
            weights = p.frozen[kind.name].layout if kind.name in p.frozen else layout
            size = weights.gathered(phase.passes, phase.rounds, parallel)
        gathered[kind.message] = gathered.get(kind.message, 0) + size
    cluster, width, updates = layout.cluster, layout.width, p.state.updates_made
    copies = cluster.ranks // width
    apart = any(map(cluster.crosses, cluster.shard_groups(width)))
    spread = any(map(cluster.crosses, cluster.replicate_groups(width)))
    reduced, message = layout.reduced() * updates, layout.message() * updates
    gathered["gradients, reduced to their parts"] = reduced
    items = [Traffic(purpose, size * (width - 1) // width, apart) for purpose, size in gathered.items()]
    items.append(Traffic("gradients, summed over copies", 2 * reduced // width * (copies - 1) // copies, spread))
    everywhere = 2 * message * (cluster.ranks - 1) // cluster.ranks
    items.append(Traffic("gradients of replicated weights", everywhere, cluster.nodes > 1))
    return [item for item in items if item.size]
