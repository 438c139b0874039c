"""The batches of a planned step in words, its operations, and its messages: bytes that a rank receives and sends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from phalanx.config.messages import counted
from phalanx.distributed.mesh import ACTOR, ROLLOUT
from phalanx.run.roles import Roles
from phalanx.tools.plan.ledger import kinds
from phalanx.tools.plan.rehearsal import Rehearsal, RLRehearsal
from phalanx.tools.plan.tables import Rows


def batch(p: Rehearsal) -> Rows:
    """How a step is divided over ranks, optimizer steps and micro-batches."""
    trainer, noun = p.cfg.trainer, p.kind.drawn.removesuffix("s")
    total, rows = trainer.total_training_steps, p.step_rows(noun)
    run = "" if total is None else counted(total, "step")
    if total is not None and p.plan is not None:
        run += f", {counted(total * p.plan.updates * p.plan.epochs, 'optimizer step')}"
    passes = []
    for kind in kinds(p.frozen):  # decoding a language model takes as many passes as a response has tokens
        took = p.ledger.phases.get(kind.name)
        if kind.passes and took is not None and took.passes and not (kind.draws and p.policy.tokens):
            passes.append(f"{took.passes} {kind.passes}")
    return [
        *rows,
        *p.policy.input_rows(p),
        ("forward passes", f"{', '.join(passes)}, per rank and {p.unit}"),
        ("run", run or f"as many steps as trainer.total_epochs={trainer.total_epochs} gives"),
    ]


def arithmetic(parts: Sequence[Rehearsal], roles: Roles, *, alternate: bool = False) -> Rows:
    """Operations of a step, of each policy of a joint run, or of the ranks of each role. alternate: each step trains
    only one of the policies.
    """
    rows = []
    for p in parts:
        if p.role:
            rows.append((p.role, _operation_count(cast(RLRehearsal, p).flops_of_role, len(roles.ranks[p.role]))))
            continue
        text = _operation_count(p.flops, p.policy.layout.cluster.ranks)
        if alternate:
            text += f"; {_operation_count(cast(RLRehearsal, p).drawn_flops)} in a step that does not train it"
        rows.append((p.part or "a step", text))
        again = 1 - p.model_flops / p.flops
        if again > 0 and not p.part:
            rows.append(("repeated", f"{100 * again:.0f} % of it, recomputed in backward passes"))
    if any(p.policy.tokens for p in parts):
        rows.append(("assumed", "all prompts and responses have their maximum lengths"))
    return [*rows, ("left out", "rewards, text encoders, VAE and vision tower")]


def _operation_count(flops: int, ranks: int = 1) -> str:
    """A number of operations with its unit, and each rank's share of it."""
    unit, size = ("PFLOP", 1e15) if flops >= 1e15 else ("TFLOP", 1e12)
    text = f"{flops / size:.4g} {unit}"
    return text if ranks == 1 else f"{text}, {flops / ranks / size:.4g} per rank"


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank receives in a training step. nodes: they cross a group of several nodes."""

    what: str
    size: int
    nodes: bool


def messages(p: Rehearsal) -> list[Traffic]:
    """The messages of a planned job that are not negligible, each sent around a ring.

    In a ring of n ranks, a gather of b bytes brings (n - 1) / n b to each rank, a reduce-scatter of b takes as much,
    and an all-reduce both. Single numbers, such as rewards and norms, are left out.
    """
    layout, parallel, phases = p.policy.layout, p.cfg.parallel, p.ledger.phases
    engine = p.cfg.rollout.facts.weights == "copy" and p.role in ("", ROLLOUT)
    gathered = {"weights, gathered for the engine": layout.for_engine() * engine}  # bytes of whole weights
    if p.role == ACTOR:
        sharded = [w for w in layout.trained if w.sharded]
        gathered["weights, gathered for other roles"] = sum(w.gathered * w.kept.itemsize for w in sharded)
    for kind in kinds(p.frozen):
        if not kind.message or kind.name not in phases:
            continue
        phase, reshards = phases[kind.name], parallel.reshard_after_forward
        if kind.name == "update":  # backward passes gather the blocks again, and so does the second of two forwards
            micro_batches = p.state.micro_batches
            size = layout.gathered_times(micro_batches + phase.passes * reshards, micro_batches)
        else:
            weights = p.frozen[kind.name].layout if kind.name in p.frozen else layout
            keeps = parallel.rollout_unsharded or not reshards
            size = weights.gathered_times(phase.rounds if keeps else phase.passes, phase.rounds)
            size += weights.experts() * phase.rounds * parallel.rollout_unsharded
        gathered[kind.message] = gathered.get(kind.message, 0) + size
    cluster, width, updates = layout.cluster, layout.width, p.state.updates_made
    copies = cluster.ranks // width
    apart = cluster.nodes > 1 and cluster.per_node % width > 0  # a copy of the weights spans nodes
    spread = cluster.nodes > 1 and copies > 1
    reduced, message = layout.reduced() * updates, layout.message() * updates
    reductions = p.state.micro_batches if parallel.sync_each_batch else updates
    gathered["gradients, reduced to their parts"] = layout.reduced() * reductions
    items = [Traffic(purpose, size * (width - 1) // width, apart) for purpose, size in gathered.items()]
    items.append(Traffic("gradients, summed over copies", 2 * reduced // width * (copies - 1) // copies, spread))
    everywhere = 2 * message * (cluster.ranks - 1) // cluster.ranks
    items.append(Traffic("gradients of replicated weights", everywhere, cluster.nodes > 1))
    return [item for item in items if item.size]
