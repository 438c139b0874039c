"""The plan in words and tables."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from phalanx.config.run import RLConfig, RunConfig
from phalanx.distributed.placement import judged_beside, place
from phalanx.distributed.roles import Roles, roles_of, span
from phalanx.plan.batch import batch, counted
from phalanx.plan.blueprint import shipped
from phalanx.plan.layout import Cluster, Weight
from phalanx.plan.memory import Memory, count
from phalanx.plan.pace import Gpu, Rows, arithmetic
from phalanx.plan.recompute import fewer_blocks
from phalanx.plan.rehearsal import Planned
from phalanx.plan.tables import Scale, groups, listed, table
from phalanx.plan.tasks import task_of
from phalanx.plan.traffic import Traffic, messages
from phalanx.plan.warnings import ALLOWED, crossing, warnings


def describe(p: Planned, gpu: Gpu) -> str:
    """The plan of one size."""
    memory, layout = count(p, gpu.memory), p.policy.layout
    trained, total = numbers(layout.trained), numbers(layout.weights)
    title, rows = arithmetic(p, gpu)
    across = crossing(layout, range(layout.cluster.ranks), layout.cluster.per_node)
    sections = [
        [*header(layout.cluster), *shipped_shapes(p, memory)],
        ["Topology", *listed(_topology(p))],
        ["Batch", *listed(batch(p))],
        [f"Memory of a rank ({total / 1e9:.3g} B weights, {trained / 1e9:.3g} B of them trained)", *held(memory)],
        [*phases(memory, gpu), *checkpointing(p, gpu), *judging(p, memory)],
        ["In the host's memory", *listed(_host(p, memory))],
        ["Messages of a step: what a rank receives, and sends as much of", *_messages(messages(p))],
        [title, *listed(rows)],
        [f"warning: {warning}" for warning in (*across, *warnings(p, memory, gpu))],
    ]
    return joined(sections)


def numbers(weights: Iterable[Weight]) -> int:
    """Elements of all of these."""
    return sum(w.numel for w in weights)


def header(c: Cluster) -> list[str]:
    """The first line."""
    return [f"Plan of {words(c)}; no GPU, process group or weights were used"]


def joined(sections: Iterable[Sequence[str]]) -> str:
    """The sections that have lines."""
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


def roles_on(cfg: RunConfig, c: Cluster) -> Roles:
    """The roles of a cluster's ranks; ConfigError where the placement does not fit it."""
    return roles_of(cfg.placement if isinstance(cfg, RLConfig) else {}, c.launch)


def words(c: Cluster) -> str:
    """A cluster in words."""
    return f"{counted(c.nodes, 'node')} x {c.per_node} = {counted(c.ranks, 'rank')}"


def shipped_shapes(p: Planned, memory: Memory) -> Iterator[str]:
    """The models whose files were not within reach."""
    folders = [policy.config.path for policy in (p.policy, *p.frozen.values())]
    if memory.reward is not None and memory.reward.folder is not None:
        folders.append(memory.reward.folder)
    models = dict.fromkeys(filter(None, map(shipped, folders)))
    if models:
        yield f"Shapes of {' and '.join(models)} as shipped with Phalanx: no hub has them within reach"


# -- topology -----------------------------------------------------------------------------------------------------


def _topology(p: Planned) -> Rows:
    cluster, width, model = p.policy.layout.cluster, p.policy.layout.width, p.cfg.reward.model
    names = ", ".join(f.name or f.path or "" for f in p.cfg.reward.functions)
    rows = [("nodes", groups(cluster.shard_groups(cluster.per_node))), ("weights", copies(cluster, width))]
    if width > 1:
        rows.append(("shard groups", groups(cluster.shard_groups(width))))
    if 1 < width < cluster.ranks:
        rows.append(("replicate groups", groups(cluster.replicate_groups(width))))
    shared = p.cfg.parallel.ulysses_sequence_parallel_size
    if shared > 1:
        rows.append(("context groups", f"{groups(cluster.shard_groups(shared))}: each has samples of its own"))
    rows.append(("rewards", f"{names}: on every rank, for its own {task_of(p.cfg).samples}" if names else "none"))
    if model.path is not None:  # a replica never crosses a node: `place` refuses it
        domains = place(model, cluster.ranks, cluster.per_node)
        replicas = []
        for domain in domains:
            replicas += [range(ranks[0], ranks[-1] + 1) for ranks in domain.replicas]
        rows.append(("reward groups", f"{groups(replicas)}: each holds reward.model, for the judges"))
    return rows


def copies(cluster: Cluster, width: int) -> str:
    """The copies of the weights, of `width` ranks each."""
    copies = cluster.ranks // width
    if width == 1:
        return "a copy of the weights on each rank"
    return f"{copies} cop{'y' if copies == 1 else 'ies'} of the weights, each over {width} ranks"


# -- memory -------------------------------------------------------------------------------------------------------


def held(memory: Memory) -> Iterator[str]:
    scale = Scale(memory.peak)
    rows = [("held throughout", scale.unit)]
    rows += [(f"  {name}", scale(size)) for name, size in memory.held.items()]
    return table(rows)


def phases(memory: Memory, gpu: Gpu) -> Iterator[str]:
    scale, held = Scale(memory.peak), sum(memory.held.values())
    rows: list[Sequence[str]] = [("phase", "held", "gathered", "activations", "gradients", "other", "together")]
    for q in memory.phases:
        name = f"{q.name} (peak)" if q is memory.largest else q.name
        parts = (held, q.gathered, q.activations, q.gradients, q.other, held + q.total)
        rows.append((name, *map(scale, parts)))
    yield from table(rows)
    if gpu.memory is not None:
        scale = Scale(gpu.memory)
        yield (
            f"  peak: {scale.plain(memory.peak)} and {scale.plain(ALLOWED)} for CUDA and NCCL, of "
            f"{scale.plain(gpu.memory)} {scale.unit}"
        )


def checkpointing(p: Planned, gpu: Gpu) -> Iterator[str]:
    """The fewest blocks to recompute, where the job recomputes more than fit."""
    fewer = fewer_blocks(p, gpu)
    if fewer is None:
        return
    blocks, flops = fewer
    key = f"model.gradient_checkpointing_blocks={blocks} of {len(p.policy.blocks)}"
    if not blocks:
        key = "model.gradient_checkpointing=false"
    before, after = 100 * (1 - p.model_flops / p.flops), 100 * (1 - p.model_flops / flops)
    yield f"  fits too: {key}; backward passes then repeat {after:.0f} instead of {before:.0f} % of a step's arithmetic"


def judging(p: Planned, memory: Memory) -> Iterator[str]:
    """The meaning of the reward model's figures."""
    reward, model = memory.reward, p.cfg.reward.model
    if reward is None:
        return
    what = "only the weights of reward.model; what it computes comes on top"
    share = f"{model.gpu_memory_utilization:g}"
    if reward.share is not None:
        what = f"what reward.model.gpu_memory_utilization={share} gives to vLLM"
    elif model.engine == "vllm":
        what = "only the weights of reward.model; "
        what += f"vLLM takes {share} of a GPU in all, which gpu_memory_gb=80 would count"
    where = "" if model.placement == "colocate" else f" (on {model.placement} of each node)"
    name, between = "judge", "between scorings it sleeps in the host's memory"
    if not model.sleep:
        name, between = "reward model", "it stays on the GPU between scorings"
    elif judged_beside(p.cfg, p.policy.layout.width):
        between = "awake while images are sampled and scored; else it sleeps in the host's memory"
    yield f"  {name}{where}: {what}; {between}"


def _host(p: Planned, memory: Memory) -> Rows:
    ranks, kept, judges = p.policy.layout.cluster.per_node, sum(memory.host.values()), 0
    if memory.reward is not None:
        domains = place(p.cfg.reward.model, ranks, ranks)
        judges = sum(len(replica) for domain in domains for replica in domain.replicas)
    node = kept * ranks
    if memory.reward is not None:
        node -= memory.reward.asleep * (ranks - judges)
    least = memory.loading_of_a_node(ranks, judges, cast=False)
    most = memory.loading_of_a_node(ranks, judges, cast=True)
    scale = Scale(max(node, most))
    return [
        ("a rank", host_parts(memory, scale, "")),
        ("a node", f"{scale(node)} {scale.unit}"),
        ("loading", loading_range(least, most, scale)),
    ]


def host_parts(memory: Memory, scale: Scale, per: str) -> str:
    """The sum of a rank's bytes in the host's memory, `per` such as " a rank", and its parts."""
    if not memory.host:
        return "nothing that counts"
    parts = ", ".join(f"{name} {scale(size)}" for name, size in memory.host.items())
    return f"{scale(sum(memory.host.values()))} {scale.unit}{per}: {parts}"


def loading_range(least: int, most: int, scale: Scale) -> str:
    """The most bytes of a node while its ranks load; `most`: if each rank casts files that are not here."""
    text = f"up to {scale.plain(least)} {scale.unit} a node"
    if most > least:
        text += f"; {scale.plain(most)} if files that are not here hold other dtypes, for each rank casts its own"
    return text


# -- messages -----------------------------------------------------------------------------------------------------


def _messages(items: Sequence[Traffic]) -> Iterable[str]:
    if not items:
        return ["  none"]
    scale = Scale(max(item.size for item in items))
    rows = [(scale.unit, "within a node", "across nodes")]
    within = across = 0
    for item in items:
        rows.append((item.what, scale(item.size * (not item.nodes)), scale(item.size * item.nodes)))
        within, across = within + item.size * (not item.nodes), across + item.size * item.nodes
    return table([*rows, ("together", scale(within), scale(across))])
