"""The plan of a job whose ranks have roles of their own: each role is a world of its own, and some bytes cross them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from phalanx.config.run import RLConfig
from phalanx.distributed.placement import place
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT, Roles, span
from phalanx.plan.jobs import planned
from phalanx.plan.layout import Cluster
from phalanx.plan.memory import Memory, count
from phalanx.plan.pace import Gpu, Rows, sampled
from phalanx.plan.rehearsal import Planned, RLRehearsal
from phalanx.plan.schedules import Refusal, Seconds, assumed_seconds, schedules
from phalanx.plan.tables import Scale, listed, table
from phalanx.plan.text import batch, copies, header, held, joined, judging, messages, phases, shipped_shapes
from phalanx.plan.warnings import crossing, warnings

NETWORK = 50e9  # bytes a second that are assumed between nodes: a link of 400 Gbit/s
SLOW = 0.01  # seconds that are worth a word
SHOWN = 8  # kinds of nodes, one after the other, that are drawn
# what is said of a rank of each role; the rest of a batch is of the step
_OWN = {
    ROLLOUT: ("a rank", "rollout", "forward passes"),
    INFERENCE: ("a rank", "forward passes"),
    ACTOR: ("a rank", "updates", "micro-batch", "forward passes"),
}
_OF_A_RANK = {name for names in _OWN.values() for name in names}


def describe_roles(
    cfg: RLConfig, cluster: Cluster, roles: Roles, gpu: Gpu, given: Seconds | None, refusal: Refusal
) -> str:
    """The plan of one size. `given` and `refusal`: see phalanx.plan.schedules."""
    parts: dict[str, RLRehearsal] = {}
    for role in _OWN:
        if role in roles.ranks:
            job = planned(cfg, cluster, roles, role)
            assert isinstance(job, RLRehearsal), "only samples are drawn elsewhere"
            parts[role] = job
    memory = {role: count(p, gpu.memory) for role, p in parts.items()}
    shapes = dict.fromkeys(line for role, p in parts.items() for line in shipped_shapes(p, memory[role]))
    title, rows = schedules(cfg, roles, given or assumed_seconds(parts, roles, gpu), refusal, gpu)
    sections = [
        [*header(cluster), *shapes],
        ["Placement", *listed(_placement(cfg, cluster, roles, parts))],
        ["Batch", *listed(_batch(cfg, parts[ACTOR]))],
        *(lines for role, p in parts.items() for lines in _of_role(role, p, memory[role], len(roles.ranks[role]), gpu)),
        ["In the host's memory", *listed(_host(roles, memory, cluster.per_node))],
        ["What crosses roles in a step", *listed(_across(roles, parts))],
        ["Messages of a step within a role: what a rank receives, and sends as much of", *_messages(parts)],
        [title, *listed(rows)],
        [
            f"warning: {role}: {warning}"
            for role, p in parts.items()
            for warning in (
                *crossing(p.policy.layout, roles.ranks[role], cluster.per_node),
                *warnings(p, memory[role], gpu),
            )
        ],
    ]
    return joined(sections)


def _placement(cfg: RLConfig, cluster: Cluster, roles: Roles, parts: Mapping[str, Planned]) -> Rows:
    return [*drawn(roles, cluster.per_node), *_layouts(roles, parts), *_rewards(cfg, roles, cluster)]


def drawn(roles: Roles, per_node: int) -> Rows:
    """The ranks of each node as the first letters of their roles; neighbouring nodes that are alike in one line."""
    letters = "".join(roles.of(rank)[0] for rank in range(roles.world_size))
    nodes = [letters[first : first + per_node] for first in range(0, len(letters), per_node)]
    rows, first = [], 0
    for node, alike in groupby(nodes):
        last = first + len(list(alike)) - 1
        rows.append((f"node {first}" if first == last else f"nodes {first}-{last}", node))
        first = last + 1
    if len(rows) > SHOWN:
        rows[SHOWN - 1 : -1] = [("..", "")]
    return rows


def _layouts(roles: Roles, parts: Mapping[str, Planned]) -> Rows:
    rows = []
    for role, p in parts.items():
        ranks, layout = roles.ranks[role], p.policy.layout
        number = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"
        rows.append((role, f"{role[0]}: {number}, {span(ranks)}; {copies(layout.cluster, layout.width)}"))
    return rows


def _rewards(cfg: RLConfig, roles: Roles, cluster: Cluster) -> Rows:
    """Where samples are scored."""
    names = ", ".join(f.name or f.path or "" for f in cfg.reward.functions)
    rows = [("rewards", f"{names}: on the ranks of the rollout, each for its own {sampled(cfg)}" if names else "none")]
    if cfg.reward.model.path is not None:
        own, ranks = roles.launch(ROLLOUT, cluster.launch), roles.ranks[ROLLOUT]
        domains = place(cfg.reward.model, own.world_size, own.local_world_size)
        replicas = [span(tuple(ranks[i] for i in replica)) for domain in domains for replica in domain.replicas]
        if len(replicas) > SHOWN:
            replicas[SHOWN - 1 : -1] = [".."]
        rows.append(("reward groups", f"{' | '.join(replicas)}: each holds reward.model, for the judges"))
    return rows


def _batch(cfg: RLConfig, actor: Planned) -> Rows:
    """The arithmetic of a step, of all roles."""
    schedule = cfg.rollout.schedule
    if schedule == "pipelined":
        schedule += f", in {cfg.rollout.parts} parts"
    return [*((name, text) for name, text in batch(actor) if name not in _OF_A_RANK), ("schedule", schedule)]


def _of_role(role: str, p: Planned, memory: Memory, ranks: int, gpu: Gpu) -> Iterator[list[str]]:
    """What a rank does, and its memory."""
    layout = p.policy.layout
    trained, total = (sum(w.numel for w in weights) for weights in (layout.trained, layout.weights))
    what = f"{total / 1e9:.3g} B weights"
    what += f", {trained / 1e9:.3g} B of them trained" if role == ACTOR else ", without gradients and optimizer"
    rows = [(name, text) for name, text in batch(p) if name in _OWN[role] and not text.startswith(", ")]
    yield [f"{role.capitalize()}, a rank of {ranks} ({what})", *listed(rows), *held(memory)]
    yield [*phases(memory, gpu), *judging(p, memory)]


def _host(roles: Roles, memory: Mapping[str, Memory], per_node: int) -> Rows:
    """Of each role's ranks, and of the fullest node, with ranks of whatever roles."""
    kept = {role: sum(m.host.values()) for role, m in memory.items()}
    nodes = [[roles.of(r) for r in range(n, n + per_node)] for n in range(0, roles.world_size, per_node)]
    full, least, most = 0, 0, 0
    for node in nodes:
        full = max(full, sum(kept[role] for role in node))
        loads = [
            sum(memory[role].loading_of_a_node(node.count(role), node.count(role), cast=cast) for role in set(node))
            for cast in (False, True)
        ]
        least, most = max(least, loads[0]), max(most, loads[1])
    scale = Scale(max(full, most))
    rows = []
    for role, m in memory.items():
        parts = ", ".join(f"{name} {scale(size)}" for name, size in m.host.items())
        rows.append((role, f"{scale(kept[role])} {scale.unit} a rank: {parts}" if parts else "nothing that counts"))
    loading = f"up to {scale.plain(least)} {scale.unit} a node"
    if most > least:
        loading += f"; {scale.plain(most)} if files that are not here hold other dtypes, for each rank casts its own"
    return [*rows, ("a node", f"up to {scale(full)} {scale.unit}"), ("loading", loading)]


def _across(roles: Roles, parts: Mapping[str, RLRehearsal]) -> Rows:
    """The weights that the actor sends, and the samples that it gets."""
    cfg, layout, ranks = parts[ACTOR].cfg, parts[ACTOR].policy.layout, roles.ranks
    weights = sum(w.numel * w.kept.itemsize for w in layout.trained)
    rollout = parts[ROLLOUT]
    samples = rollout.sent * len(ranks[ROLLOUT]) * rollout.plan.parts
    what = "the LoRA alone" if cfg.model.lora_rank > 0 else "all trained tensors"
    others = roles.world_size - len(ranks[ACTOR])
    to = f"from rank {ranks[ACTOR][0]} to each of {others} that sample{' or score' * (INFERENCE in ranks)}"
    again = ", and again for a validation" if "validation: sample" in rollout.ledger.phases else ""
    way = "to inference, and on to the actor" if INFERENCE in ranks else "to the actor"
    time = f"; {weights / NETWORK:.2g} s at {NETWORK / 1e9:.0f} GB/s" if weights >= SLOW * NETWORK else ""
    total = parts[ACTOR].plan.samples
    return [
        ("weights", f"{_size(weights)}, {what}, {to}{again}{time}"),
        ("samples", f"{_size(samples)} of {total} {sampled(cfg)}, from the rollout {way}"),
    ]


def _size(size: int) -> str:
    scale = Scale(size)
    return f"{scale.plain(size)} {scale.unit}"


def _messages(parts: Mapping[str, Planned]) -> Iterator[str]:
    found = [(role, item) for role, p in parts.items() for item in messages(p)]
    if not found:
        yield "  none"
        return
    scale = Scale(max(item.size for _, item in found))
    rows: list[Sequence[str]] = [(scale.unit, "within a node", "across nodes")]
    for role, item in found:
        size = scale(item.size)
        rows.append((f"{role}: {item.what}", *(("-", size) if item.nodes else (size, "-"))))
    yield from table(rows)
