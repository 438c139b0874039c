"""The plan in words and tables: of a job, or of the ranks of each role if roles are separate worlds."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from phalanx.config.messages import counted
from phalanx.config.run import RunConfig
from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT
from phalanx.distributed.placement import place
from phalanx.run.kind import kind_of
from phalanx.run.roles import Roles, roles_of, span
from phalanx.tools.plan.batch import arithmetic, batch, messages
from phalanx.tools.plan.jobs import roles_on
from phalanx.tools.plan.layout import Cluster, Weight
from phalanx.tools.plan.memory import MAPPED, Memory, count
from phalanx.tools.plan.rehearsal import Rehearsal, RLRehearsal
from phalanx.tools.plan.tables import Rows, Scale, groups, listed
from phalanx.tools.plan.warnings import allowance, fewer_blocks, warnings

# rows of a batch that are about a rank of each role; the others are about the whole step
OF_A_RANK = {
    ROLLOUT: ("a rank", "rollout", "forward passes"),
    INFERENCE: ("a rank", "forward passes"),
    ACTOR: ("a rank", "updates", "micro-batch", "forward passes"),
}


def describe(
    cluster: Cluster, parts: Sequence[Rehearsal], gpu_memory: int | None = None, *, alternate: bool = False
) -> str:
    """The plan of a job of these parts (phalanx.tools.plan.jobs.parts_of).

    gpu_memory: bytes of a GPU; None if unknown. alternate: the policies of a joint run are trained in different steps.
    """
    cfg = parts[-1].cfg
    if parts[0].part:  # each policy of a joint run shares the device with the other one
        held = {p.part: sum(count(p, gpu_memory).held.values()) for p in parts}
        for p in parts:
            p.beside = {f"the {name}": size for name, size in held.items() if name != p.part}
    roles = roles_on(cfg, cluster) if parts[0].role else roles_of({}, cluster.launch)
    memories = [(p, count(p, gpu_memory)) for p in parts]
    of_ranks: list[list[str]] = []
    warned = []
    for p, memory in memories:
        ranks, label = roles.ranks[p.role or ACTOR], f"{p.label}: " if p.label else ""
        of_ranks += _of_a_rank(p, memory, len(ranks), gpu_memory)
        for warning in warnings(p, memory, gpu_memory, ranks, cluster.per_node):
            warned.append(f"warning: {label}{warning}")
    topology, within = ("Topology", "") if roles.collocated else ("Placement", " within a role")
    title = f"Plan of {words(cluster)}; no GPU, process group or weights were used"
    if cfg.runs:
        alone = "memory is that of all of them, batches, messages and arithmetic are those of one"
        title += f"\nA sweep of {len(cfg.runs)} runs: {alone}"
    sections = [
        [title],
        [topology, *listed([*_rank_rows(parts, roles, cluster), *_reward_rows(cfg, roles, cluster)])],
        *_batch_lines(parts),
        *of_ranks,
        ["In the host's memory", *listed(_host_rows(memories, roles, cluster.per_node))],
        _role_lines(parts, roles),
        [f"Messages of a step{within}: bytes that each rank receives, and sends as well", *_message_lines(parts)],
        ["Arithmetic", *listed(arithmetic(parts, roles, alternate=alternate))],
        warned,
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def sizes(cfg: RunConfig, clusters: Sequence[Cluster], refused: Mapping[Cluster, str]) -> str:
    """A line for each number of nodes: the share of a rank, or the reason why the job is refused."""
    each = cfg.rollout.n if "algorithm" in vars(cfg) else 1
    rows = []
    for c in clusters:
        if c in refused:
            rows.append((words(c), f"refused: {refused[c]}"))
            continue
        roles, ranks = roles_on(cfg, c), cfg.parallel.data_ranks(c.ranks)
        text = ", ".join(f"{role} {span(members)}" for role, members in roles.ranks.items())
        if roles.collocated:
            share = cfg.data.batch_size(ranks) * each // ranks
            text = f"{share} {kind_of(cfg).drawn} per rank, {copies(c, c.width(cfg.parallel))}"
        rows.append((words(c), text))
    return "\n".join(["Sizes", *listed(rows)])


def words(c: Cluster) -> str:
    """A cluster in words."""
    return f"{counted(c.nodes, 'node')} x {c.per_node} = {counted(c.ranks, 'rank')}"


# -- ranks and batches --------------------------------------------------------------------------------------------


def _rank_rows(parts: Sequence[Rehearsal], roles: Roles, cluster: Cluster) -> Rows:
    """Groups of ranks that share weights or samples, or the ranks of each role."""
    rows = []
    for p in parts if not roles.collocated else ():
        ranks, layout = roles.ranks[p.role], p.policy.layout
        text = f"{counted(len(ranks), 'rank')}, {span(ranks)}; {copies(layout.cluster, layout.width)}"
        rows.append((p.role, text))
    if rows:
        return rows
    width, shared = parts[0].policy.layout.width, parts[0].cfg.parallel.ulysses_sequence_parallel_size
    rows = [("weights", copies(cluster, width))]
    if width > 1:
        rows.append(("shard groups", groups(cluster.shard_groups(width))))
    if shared > 1:
        rows.append(("context groups", f"{groups(cluster.shard_groups(shared))}: each has its own samples"))
    return rows


def copies(cluster: Cluster, width: int) -> str:
    """The copies of the weights, each sharded over `width` ranks."""
    copies = cluster.ranks // width
    if width == 1:
        return "a copy of the weights on each rank"
    return f"{copies} cop{'y' if copies == 1 else 'ies'} of the weights, each over {width} ranks"


def _reward_rows(cfg: RunConfig, roles: Roles, cluster: Cluster) -> Rows:
    """The ranks that score samples."""
    names = ", ".join(f.name or f.path or "" for f in cfg.reward.functions)
    where = "every rank, for its own" if roles.collocated else "the ranks of the rollout, each for its own"
    rows = [("rewards", f"{names}: on {where} {kind_of(cfg).drawn}" if names else "none")]
    if cfg.reward.model.path is not None:
        launch, ranks = roles.launch(ROLLOUT, cluster.launch), roles.ranks[ROLLOUT]
        domains = place(cfg.reward.model, launch.world_size, launch.local_world_size)
        replicas = [[ranks[i] for i in replica] for domain in domains for replica in domain.replicas]
        rows.append(("reward groups", f"{groups(replicas)}: each holds reward.model, for the judges"))
    return rows


def _batch_lines(parts: Sequence[Rehearsal]) -> Iterator[list[str]]:
    """The batch of a step, of each policy of a joint run, or of the whole step if ranks have roles."""
    if parts[0].part:
        yield from ([f"Batch of the {p.part}", *listed(batch(p))] for p in parts)
        return
    rows, r = batch(parts[-1]), parts[-1].cfg.rollout  # the actor's
    if parts[-1].role:
        of_a_rank = set().union(*OF_A_RANK.values())
        schedule = f"{r.schedule}, in {r.parts} parts" if r.schedule == "pipelined" else r.schedule
        rows = [*(row for row in rows if row[0] not in of_a_rank), ("schedule", schedule)]
    yield ["Batch", *listed(rows)]


# -- memory -------------------------------------------------------------------------------------------------------


def _of_a_rank(p: Rehearsal, memory: Memory, ranks: int, gpu_memory: int | None) -> Iterator[list[str]]:
    """The memory of a rank; for one of the `ranks` ranks of a role also its share of the batch."""
    layout, title, work = p.policy.layout, f"Memory of a rank{': ' * bool(p.part)}{p.part}", []
    trained = f"{_in_billions(layout.trained)} B of them trained"
    if p.role:
        title = f"{p.role.capitalize()}, a rank of {ranks}"
        work = [row for row in batch(p) if row[0] in OF_A_RANK[p.role] and not row[1].startswith(", ")]
    if p.role not in ("", ACTOR):
        trained = "without gradients and optimizer"
    scale = Scale(memory.peak)
    rows = [("held throughout", scale.unit), *((f"  {name}", scale(size)) for name, size in memory.held.items())]
    yield [f"{title} ({_in_billions(layout.weights)} B weights, {trained})", *listed(work), *listed(rows, 1)]
    yield [*_phase_lines(p, memory, gpu_memory), *_checkpointing_lines(p, gpu_memory)]


def _in_billions(weights: Iterable[Weight]) -> str:
    return f"{sum(w.count for w in weights) / 1e9:.3g}"


def _phase_lines(p: Rehearsal, memory: Memory, gpu_memory: int | None) -> Iterator[str]:
    scale, held = Scale(memory.peak), sum(memory.held.values())
    rows: list[Sequence[str]] = [("phase", "held", "gathered", "activations", "gradients", "other", "together")]
    for q in memory.phases:
        name = f"{q.name} (peak)" if q is memory.largest else q.name
        sizes = (held, q.gathered, q.activations, q.gradients, q.other, held + q.total)
        rows.append((name, *map(scale, sizes)))
    yield from listed(rows, 1)
    if gpu_memory is not None:
        plain, unit = Scale(gpu_memory).plain, Scale(gpu_memory).unit
        beside, owners = allowance(p, memory)
        yield f"  peak: {plain(memory.peak)} and {plain(beside)} for {owners}, of {plain(gpu_memory)} {unit}"


def _checkpointing_lines(p: Rehearsal, gpu_memory: int | None) -> Iterator[str]:
    """The smallest number of recomputed blocks that fits, if it is below the configured one."""
    fewer = None if p.role else fewer_blocks(p, gpu_memory)
    if fewer is None:
        return
    blocks, flops = fewer
    key = f"{p.cfg.model:gradient_checkpointing_blocks}={blocks} of {len(p.policy.blocks)}"
    key = key if blocks else f"{p.cfg.model:gradient_checkpointing}=false"
    before, after = 100 * (1 - p.model_flops / p.flops), 100 * (1 - p.model_flops / flops)
    yield f"  fits too: {key}; backward passes then repeat {after:.0f} instead of {before:.0f} % of a step's arithmetic"


def _host_rows(memories: Sequence[tuple[Rehearsal, Memory]], roles: Roles, per_node: int) -> Rows:
    """The host's memory for a rank of each part, and for the fullest node, whichever roles its ranks have."""
    fullest = 0
    for first in range(0, roles.world_size, per_node):
        on_node, kept = Counter(map(roles.of, range(first, first + per_node))), 0
        kept += max(memory.host.get(MAPPED, 0) for _, memory in memories)
        for p, memory in memories:
            ranks = on_node[p.role or ACTOR]
            kept += ranks * (sum(memory.host.values()) - memory.host.get(MAPPED, 0))
            if memory.reward is not None and not p.role:  # in a role, each rank counts as one that holds a part of it
                domains = place(p.cfg.reward.model, per_node, per_node)
                judges = sum(len(replica) for domain in domains for replica in domain.replicas)
                kept -= memory.host.get("sleeping reward model", 0) * (ranks - judges)
        fullest = max(fullest, kept)
    scale = Scale(fullest)
    rows = []
    for p, memory in memories:
        parts = ", ".join(f"{name} {scale(size)}" for name, size in memory.host.items())
        total = f"{scale(sum(memory.host.values()))} {scale.unit}{' per rank' * bool(p.label)}"
        rows.append((p.label or "a rank", f"{total}: {parts}" if parts else "nothing of note"))
    bound = "" if roles.collocated else "up to "
    return [*rows, ("a node", f"{bound}{scale(fullest)} {scale.unit}")]


def _role_lines(parts: Sequence[Rehearsal], roles: Roles) -> list[str]:
    """The weights that the actor sends and the samples that it receives, if ranks have roles."""
    rollout, actor, ranks = cast(RLRehearsal, parts[0]), cast(RLRehearsal, parts[-1]), roles.ranks
    if roles.collocated:
        return []
    cfg, scores = rollout.cfg, INFERENCE in ranks
    weights = sum(w.numel * w.kept.itemsize for w in actor.policy.layout.trained)
    samples = rollout.sent * len(ranks[ROLLOUT]) * rollout.plan.parts
    what = "only the LoRA" if cfg.model.lora_rank > 0 else "all trained tensors"
    others = roles.world_size - len(ranks[ACTOR])
    to = f"from rank {ranks[ACTOR][0]} to each of {others} ranks that sample{' or score' * scores}"
    again = ", and again for a validation" if "validation: sample" in rollout.ledger.phases else ""
    way = "to inference, and on to the actor" if scores else "to the actor"
    drawn = f"{actor.plan.samples} {kind_of(cfg).drawn}"
    rows = [
        ("weights", f"{Scale.of(weights)}, {what}, {to}{again}"),
        ("samples", f"{Scale.of(samples)} of {drawn}, from the rollout {way}"),
    ]
    return ["What crosses roles in a step", *listed(rows)]


def _message_lines(parts: Sequence[Rehearsal]) -> Iterable[str]:
    items = [(p.label, item) for p in parts for item in messages(p)]
    if not items:
        return ["  none"]
    scale = Scale(max(item.size for _, item in items))
    rows: list[Sequence[str]] = [(scale.unit, "within a node", "across nodes")]
    together = [0, 0]
    for label, item in items:
        sizes = item.size * (not item.nodes), item.size * item.nodes
        rows.append((f"{label}: {item.what}" if label else item.what, *map(scale, sizes)))
        together[item.nodes] += item.size
    if not parts[0].role:
        rows.append(("together", *map(scale, together)))
    return listed(rows, 1)
