"""The plan in words and tables: of a job, or of each role of its ranks, where roles are separate worlds."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from phalanx.config.joint import JointConfig
from phalanx.config.messages import counted
from phalanx.config.rules import of_part
from phalanx.config.run import RLConfig, RunConfig
from phalanx.distributed.placement import judged_beside, place
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT, Roles, roles_of, span
from phalanx.plan.batch import batch, messages
from phalanx.plan.blueprint import shipped
from phalanx.plan.jobs import roles_on, task_of
from phalanx.plan.layout import Cluster, Weight
from phalanx.plan.memory import Memory, count
from phalanx.plan.pace import Gpu, Seconds, arithmetic, assumed_seconds, schedules
from phalanx.plan.rehearsal import Planned, RLRehearsal
from phalanx.plan.tables import GROUPS, Rows, Scale, groups, listed, shortened, table
from phalanx.plan.warnings import ALLOWED, crossing, fewer_blocks, warnings

NETWORK = 50e9  # assumed bytes per second between nodes: a link of 400 Gbit/s
SLOW = 0.01  # seconds; shorter transfers are not mentioned
SHOWN = 8  # kinds of nodes, one after the other, and groups of a role that are written out
COMPILED = (
    "  model.compile: counted as without it; blocks then keep fewer activations for the backward pass, but in passes "
    "without one each block holds its own until it ends"
)
# lines of a batch about a rank of each role; the others are about the step
OF_A_RANK = {
    ROLLOUT: ("a rank", "rollout", "forward passes"),
    INFERENCE: ("a rank", "forward passes"),
    ACTOR: ("a rank", "updates", "micro-batch", "forward passes"),
}


def describe(
    cfg: RunConfig | JointConfig, cluster: Cluster, parts: Sequence[Planned], gpu: Gpu, given: Seconds | None = None
) -> str:
    """The plan of a job of these parts (phalanx.plan.jobs.parts_of). `given`: the seconds of each role's phase, None to
    go by the arithmetic.
    """
    if isinstance(cfg, JointConfig):  # each policy is beside the other one, on all ranks
        held = {p.part: sum(count(p, gpu.memory).held.values()) for p in parts}
        for p in parts:
            p.beside = {f"the {name}": size for name, size in held.items() if name != p.part}
    roles = roles_on(parts[0].cfg, cluster) if parts[0].role else roles_of({}, cluster.launch)
    memories = [(p, count(p, gpu.memory)) for p in parts]
    shapes: dict[str, None] = {}
    of_ranks: list[list[str]] = []
    warned = []
    for p, memory in memories:
        ranks, layout, label = roles.ranks[p.role or ACTOR], p.policy.layout, f"{p.label}: " if p.label else ""
        shapes |= dict.fromkeys(_shipped_shapes(p, memory))
        of_ranks += _of_a_rank(p, memory, len(ranks), gpu)
        across = crossing(layout, ranks, cluster.per_node)
        for warning in (*across, *warnings(p, memory, gpu)):
            warned.append(f"warning: {label}{of_part(warning, p.part) if p.part else warning}")
    topology, within = ("Topology", "") if roles.collocated else ("Placement", " within a role")
    times = [arithmetic(cfg, parts, gpu)] if roles.collocated else []
    if isinstance(cfg, RLConfig) and (given is not None or not roles.collocated):
        times.append(schedules(cfg, cluster, roles, given or assumed_seconds(parts, gpu), gpu))
    timed = [[title, *listed(rows)] for title, rows in times]
    sections = [
        [f"Plan of {words(cluster)}; no GPU, process group or weights were used", *shapes],
        [topology, *listed([*_ranks(parts, roles, cluster), *_rewards(parts[-1].cfg, roles, cluster)])],
        *_batches(parts),
        *of_ranks,
        ["In the host's memory", *listed(_host(memories, roles, cluster.per_node))],
        _across(parts, roles),
        [f"Messages of a step{within}: what a rank receives, and sends as much of", *_messages(parts)],
        timed[0],
        warned,
        *timed[1:],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def sizes(cfg: RunConfig, asked: Sequence[Cluster], refused: Mapping[Cluster, str]) -> str:
    """A line for each number of nodes: the share of a rank, or the reason why the job is refused."""
    each = cfg.rollout.n if isinstance(cfg, RLConfig) else 1
    rows = []
    for c in asked:
        roles = roles_on(cfg, c) if c not in refused else None
        if roles is None:
            rows.append((words(c), f"refused: {refused[c]}"))
        elif not roles.collocated:
            rows.append((words(c), ", ".join(f"{role} {span(ranks)}" for role, ranks in roles.ranks.items())))
        else:
            ranks = cfg.parallel.data_ranks(c.ranks)
            share = cfg.data.batch_size(ranks) * each // ranks
            rows.append((words(c), f"{share} {task_of(cfg).samples} a rank, {copies(c, c.width(cfg.parallel))}"))
    return "\n".join(["Sizes", *listed(rows)])


def words(c: Cluster) -> str:
    """A cluster in words."""
    return f"{counted(c.nodes, 'node')} x {c.per_node} = {counted(c.ranks, 'rank')}"


def _shipped_shapes(p: Planned, memory: Memory) -> Iterator[str]:
    """The models whose files were not within reach."""
    folders = [policy.config.path for policy in (p.policy, *p.frozen.values())]
    if memory.reward is not None and memory.reward.folder is not None:
        folders.append(memory.reward.folder)
    models = dict.fromkeys(filter(None, map(shipped, folders)))
    if models:
        yield f"Shapes of {' and '.join(models)} as shipped with Phalanx: no hub has them within reach"


# -- ranks and batches --------------------------------------------------------------------------------------------


def _ranks(parts: Sequence[Planned], roles: Roles, cluster: Cluster) -> Rows:
    """Groups of ranks, by what they share, or by their roles."""
    if not roles.collocated:
        rows = drawn(roles, cluster.per_node)
        for p in parts:
            ranks, layout = roles.ranks[p.role], p.policy.layout
            here = f"{counted(len(ranks), 'rank')}, {span(ranks)}; {copies(layout.cluster, layout.width)}"
            rows.append((p.role, f"{p.role[0]}: {here}"))
        return rows
    width, shared = parts[0].policy.layout.width, parts[0].cfg.parallel.ulysses_sequence_parallel_size
    rows = [("nodes", groups(cluster.shard_groups(cluster.per_node))), ("weights", copies(cluster, width))]
    if width > 1:
        rows.append(("shard groups", groups(cluster.shard_groups(width))))
    if 1 < width < cluster.ranks:
        rows.append(("replicate groups", groups(cluster.replicate_groups(width))))
    if shared > 1:
        rows.append(("context groups", f"{groups(cluster.shard_groups(shared))}: each has samples of its own"))
    return rows


def drawn(roles: Roles, per_node: int) -> Rows:
    """The ranks of each node as the first letters of their roles; neighbouring nodes that are alike in one line."""
    letters = "".join(roles.of(rank)[0] for rank in range(roles.world_size))
    nodes = [letters[first : first + per_node] for first in range(0, len(letters), per_node)]
    rows, first = [], 0
    for node, alike in groupby(nodes):
        last = first + len(list(alike)) - 1
        rows.append((f"node {first}" if first == last else f"nodes {first}-{last}", node))
        first = last + 1
    return shortened(rows, SHOWN, ("..", ""))


def copies(cluster: Cluster, width: int) -> str:
    """The copies of the weights, of `width` ranks each."""
    copies = cluster.ranks // width
    if width == 1:
        return "a copy of the weights on each rank"
    return f"{copies} cop{'y' if copies == 1 else 'ies'} of the weights, each over {width} ranks"


def _rewards(cfg: RunConfig, roles: Roles, cluster: Cluster) -> Rows:
    """Where samples are scored."""
    names = ", ".join(f.name or f.path or "" for f in cfg.reward.functions)
    where, shown = "the ranks of the rollout, each for its own", SHOWN
    if roles.collocated:
        where, shown = "every rank, for its own", GROUPS
    rows = [("rewards", f"{names}: on {where} {task_of(cfg).samples}" if names else "none")]
    if cfg.reward.model.path is not None:  # a replica never crosses a node: `place` refuses it
        launch, ranks = roles.launch(ROLLOUT, cluster.launch), roles.ranks[ROLLOUT]
        replicas = []
        for domain in place(cfg.reward.model, launch.world_size, launch.local_world_size):
            replicas += [span(tuple(ranks[i] for i in replica)) for replica in domain.replicas]
        holders = " | ".join(shortened(replicas, shown, ".."))
        rows.append(("reward groups", f"{holders}: each holds reward.model, for the judges"))
    return rows


def _batches(parts: Sequence[Planned]) -> Iterator[list[str]]:
    """The arithmetic of a step, of each policy of a joint run, or of the whole step where ranks have roles."""
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


def _of_a_rank(p: Planned, memory: Memory, ranks: int, gpu: Gpu) -> Iterator[list[str]]:
    """The memory of a rank; of a role with its work, a rank of `ranks`."""
    layout, title, work = p.policy.layout, f"Memory of a rank{': ' * bool(p.part)}{p.part}", []
    trained = f"{_numbers(layout.trained)} B of them trained"
    if p.role:
        title = f"{p.role.capitalize()}, a rank of {ranks}"
        work = [row for row in batch(p) if row[0] in OF_A_RANK[p.role] and not row[1].startswith(", ")]
    if p.role not in ("", ACTOR):
        trained = "without gradients and optimizer"
    scale = Scale(memory.peak)
    rows = [("held throughout", scale.unit), *((f"  {name}", scale(size)) for name, size in memory.held.items())]
    yield [f"{title} ({_numbers(layout.weights)} B weights, {trained})", *listed(work), *table(rows)]
    fewer = () if p.role else _checkpointing(p, gpu)
    compiled = [COMPILED] if p.cfg.model.compile else []
    yield [*_phases(memory, gpu), *fewer, *compiled, *_judging(p, memory)]


def _numbers(weights: Iterable[Weight]) -> str:
    """Billions of elements of all of these."""
    return f"{sum(w.count for w in weights) / 1e9:.3g}"


def _phases(memory: Memory, gpu: Gpu) -> Iterator[str]:
    scale, held = Scale(memory.peak), sum(memory.held.values())
    rows: list[Sequence[str]] = [("phase", "held", "gathered", "activations", "gradients", "other", "together")]
    for q in memory.phases:
        name = f"{q.name} (peak)" if q is memory.largest else q.name
        sizes = (held, q.gathered, q.activations, q.gradients, q.other, held + q.total)
        rows.append((name, *map(scale, sizes)))
    yield from table(rows)
    if gpu.memory is not None:
        plain, unit = Scale(gpu.memory).plain, Scale(gpu.memory).unit
        yield f"  peak: {plain(memory.peak)} and {plain(ALLOWED)} for CUDA and NCCL, of {plain(gpu.memory)} {unit}"


def _checkpointing(p: Planned, gpu: Gpu) -> Iterator[str]:
    """The fewest blocks to recompute, where the job recomputes more than fit."""
    fewer = fewer_blocks(p, gpu)
    if fewer is None:
        return
    blocks, flops = fewer
    some = f"model.gradient_checkpointing_blocks={blocks} of {len(p.policy.blocks)}"
    key = some if blocks else "model.gradient_checkpointing=false"
    key = of_part(key, p.part) if p.part else key
    before, after = 100 * (1 - p.model_flops / p.flops), 100 * (1 - p.model_flops / flops)
    yield f"  fits too: {key}; backward passes then repeat {after:.0f} instead of {before:.0f} % of a step's arithmetic"


def _judging(p: Planned, memory: Memory) -> Iterator[str]:
    """The meaning of the reward model's figures."""
    reward, model = memory.reward, p.cfg.reward.model
    if reward is None:
        return
    what, share = "what it computes comes on top", f"{model.gpu_memory_utilization:g}"
    if model.engine == "vllm":
        what = f"vLLM takes {share} of a GPU in all, which gpu_memory_gb=80 would count"
    what = f"only the weights of reward.model; {what}"
    if reward.share is not None:
        what = f"what reward.model.gpu_memory_utilization={share} gives to vLLM"
    where = "" if model.placement == "colocate" else f" (on {model.placement} of each node)"
    name, between = "judge", "between scorings it sleeps in the host's memory"
    if not model.sleep:
        name, between = "reward model", "it stays on the GPU between scorings"
    elif judged_beside(p.cfg, p.policy.layout.width):
        between = "awake while images are sampled and scored; else it sleeps in the host's memory"
    yield f"  {name}{where}: {what}; {between}"


def _host(memories: Sequence[tuple[Planned, Memory]], roles: Roles, per_node: int) -> Rows:
    """Of a rank of each part, and of the fullest node, whatever roles its ranks have."""
    full = least = most = 0
    for first in range(0, roles.world_size, per_node):
        on_node = Counter(map(roles.of, range(first, first + per_node)))
        kept = known = cast = 0
        for p, memory in memories:
            ranks = judges = on_node[p.role or ACTOR]
            if not ranks:
                continue
            if memory.reward is not None and not p.role:  # of a role, each rank counts as one that holds a part of it
                domains = place(p.cfg.reward.model, per_node, per_node)
                judges = sum(len(replica) for domain in domains for replica in domain.replicas)
                kept -= memory.reward.asleep * (ranks - judges)
            kept += ranks * sum(memory.host.values())
            loads = [memory.loading_of_a_node(ranks, judges, cast=casts) for casts in (False, True)]
            # the policies of a joint run are loaded one after the other
            known, cast = (max(known, loads[0]), max(cast, loads[1])) if p.part else (known + loads[0], cast + loads[1])
        full, least, most = max(full, kept), max(least, known), max(most, cast)
    scale = Scale(max(full, most))
    rows = []
    for p, memory in memories:
        text = "nothing that counts"
        if memory.host:
            text = f"{scale(sum(memory.host.values()))} {scale.unit}{' a rank' * bool(p.label)}: "
            text += ", ".join(f"{name} {scale(size)}" for name, size in memory.host.items())
        rows.append((p.label or "a rank", text))
    loading = f"up to {scale.plain(least)} {scale.unit} a node"
    if most > least:
        loading += f"; {scale.plain(most)} if files that are not here hold other dtypes, for each rank casts its own"
    bound = "" if roles.collocated else "up to "
    return [*rows, ("a node", f"{bound}{scale(full)} {scale.unit}"), ("loading", loading)]


# -- messages -----------------------------------------------------------------------------------------------------


def _across(parts: Sequence[Planned], roles: Roles) -> list[str]:
    """The weights that the actor sends, and the samples that it gets, where ranks have roles."""
    rollout, actor, ranks = parts[0], parts[-1], roles.ranks
    if roles.collocated:
        return []
    assert isinstance(rollout, RLRehearsal) and actor.plan is not None, "only samples are drawn elsewhere"
    cfg, scores = rollout.cfg, INFERENCE in ranks
    weights = sum(w.numel * w.kept.itemsize for w in actor.policy.layout.trained)
    samples = rollout.sent * len(ranks[ROLLOUT]) * rollout.plan.parts
    what = "only the LoRA" if cfg.model.lora_rank > 0 else "all trained tensors"
    others = roles.world_size - len(ranks[ACTOR])
    to = f"from rank {ranks[ACTOR][0]} to each of {others} that sample{' or score' * scores}"
    again = ", and again for a validation" if "validation: sample" in rollout.ledger.phases else ""
    way = "to inference, and on to the actor" if scores else "to the actor"
    time = f"; {weights / NETWORK:.2g} s at {NETWORK / 1e9:.0f} GB/s" if weights >= SLOW * NETWORK else ""
    drawn = f"{actor.plan.samples} {task_of(cfg).samples}"
    rows = [
        ("weights", f"{Scale.of(weights)}, {what}, {to}{again}{time}"),
        ("samples", f"{Scale.of(samples)} of {drawn}, from the rollout {way}"),
    ]
    return ["What crosses roles in a step", *listed(rows)]


def _messages(parts: Sequence[Planned]) -> Iterable[str]:
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
    return table(rows)
