"""The plan of a job whose ranks have roles: each role is a separate world, and some bytes cross them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from phalanx.config.run import RLConfig
from phalanx.distributed.placement import place
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT, Roles, span
from phalanx.plan.batch import batch
from phalanx.plan.jobs import planned
from phalanx.plan.layout import Cluster
from phalanx.plan.memory import Memory, count
from phalanx.plan.pace import Gpu, Rows
from phalanx.plan.rehearsal import Planned, RLRehearsal
from phalanx.plan.schedules import Refusal, Seconds, assumed_seconds, schedules
from phalanx.plan.tables import Scale, listed, table
from phalanx.plan.tasks import task_of
from phalanx.plan.text import (
    copies,
    header,
    held,
    host_parts,
    joined,
    judging,
    loading_range,
    numbers,
    phases,
    shipped_shapes,
)
from phalanx.plan.traffic import messages
from phalanx.plan.warnings import crossing, warnings

NETWORK = 50e9  # assumed bytes per second between nodes: a link of 400 Gbit/s
SLOW = 0.01  # seconds; shorter transfers are not mentioned
SHOWN = 8  # kinds of nodes, one after the other, that are drawn
# lines of a batch about a rank of each role; the others are about the step
_OWN = {
    ROLLOUT: ("a rank", "rollout", "forward passes"),
    INFERENCE: ("a rank", "forward passes"),
    ACTOR: ("a rank", "updates", "micro-batch", "forward passes"),
}
_OF_A_RANK = set().union(*_OWN.values())


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
    shapes: dict[str, None] = {}
    of_roles: list[list[str]] = []
    warned = []
    for role, p in parts.items():
        shapes |= dict.fromkeys(shipped_shapes(p, memory[role]))
        of_roles += _of_role(role, p, memory[role], len(roles.ranks[role]), gpu)
        across = crossing(p.policy.layout, roles.ranks[role], cluster.per_node)
        warned += [f"warning: {role}: {warning}" for warning in (*across, *warnings(p, memory[role], gpu))]
    title, rows = schedules(cfg, roles, given or assumed_seconds(parts, roles, gpu), refusal, gpu)
    sections = [
        [*header(cluster), *shapes],
        ["Placement", *listed(_placement(cfg, cluster, roles, parts))],
        ["Batch", *listed(_batch(cfg, parts[ACTOR]))],
        *of_roles,
        ["In the host's memory", *listed(_host(roles, memory, cluster.per_node))],
        ["What crosses roles in a step", *listed(_across(roles, parts))],
        ["Messages of a step within a role: what a rank receives, and sends as much of", *_messages(parts)],
        [title, *listed(rows)],
        warned,
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
    rows = [
        (
            "rewards",
            f"{names}: on the ranks of the rollout, each for its own {task_of(cfg).samples}" if names else "none",
        )
    ]
    if cfg.reward.model.path is not None:
        launch, ranks = roles.launch(ROLLOUT, cluster.launch), roles.ranks[ROLLOUT]
        replicas = []
        for domain in place(cfg.reward.model, launch.world_size, launch.local_world_size):
            replicas += [span(tuple(ranks[i] for i in replica)) for replica in domain.replicas]
        if len(replicas) > SHOWN:
            replicas[SHOWN - 1 : -1] = [".."]
        rows.append(("reward groups", f"{' | '.join(replicas)}: each holds reward.model, for the judges"))
    return rows


def _batch(cfg: RLConfig, actor: Planned) -> Rows:
    """The arithmetic of a step, of all roles."""
    schedule = cfg.rollout.schedule
    if schedule == "pipelined":
        schedule += f", in {cfg.rollout.parts} parts"
    return [*(row for row in batch(actor) if row[0] not in _OF_A_RANK), ("schedule", schedule)]


def _of_role(role: str, p: Planned, memory: Memory, ranks: int, gpu: Gpu) -> Iterator[list[str]]:
    """The work of a rank, and its memory."""
    layout = p.policy.layout
    what = f"{numbers(layout.weights) / 1e9:.3g} B weights"
    trained = f"{numbers(layout.trained) / 1e9:.3g} B of them trained"
    what += f", {trained}" if role == ACTOR else ", without gradients and optimizer"
    rows = [(name, text) for name, text in batch(p) if name in _OWN[role] and not text.startswith(", ")]
    yield [f"{role.capitalize()}, a rank of {ranks} ({what})", *listed(rows), *held(memory)]
    yield [*phases(memory, gpu), *judging(p, memory)]


def _host(roles: Roles, memory: Mapping[str, Memory], per_node: int) -> Rows:
    """Of each role's ranks, and of the fullest node, whatever roles its ranks have."""
    full = least = most = 0
    for first in range(0, roles.world_size, per_node):
        kept = known = cast = 0
        for role, ranks in Counter(map(roles.of, range(first, first + per_node))).items():
            kept += ranks * sum(memory[role].host.values())
            known += memory[role].loading_of_a_node(ranks, ranks, cast=False)
            cast += memory[role].loading_of_a_node(ranks, ranks, cast=True)
        full, least, most = max(full, kept), max(least, known), max(most, cast)
    scale = Scale(max(full, most))
    rows = [(role, host_parts(m, scale, " a rank")) for role, m in memory.items()]
    return [*rows, ("a node", f"up to {scale(full)} {scale.unit}"), ("loading", loading_range(least, most, scale))]


def _across(roles: Roles, parts: Mapping[str, RLRehearsal]) -> Rows:
    """The weights that the actor sends, and the samples that it gets."""
    cfg, layout, ranks = parts[ACTOR].cfg, parts[ACTOR].policy.layout, roles.ranks
    weights = sum(w.numel * w.kept.itemsize for w in layout.trained)
    rollout = parts[ROLLOUT]
    samples = rollout.sent * len(ranks[ROLLOUT]) * rollout.plan.parts
    what = "only the LoRA" if cfg.model.lora_rank > 0 else "all trained tensors"
    others = roles.world_size - len(ranks[ACTOR])
    to = f"from rank {ranks[ACTOR][0]} to each of {others} that sample{' or score' * (INFERENCE in ranks)}"
    again = ", and again for a validation" if "validation: sample" in rollout.ledger.phases else ""
    way = "to inference, and on to the actor" if INFERENCE in ranks else "to the actor"
    time = f"; {weights / NETWORK:.2g} s at {NETWORK / 1e9:.0f} GB/s" if weights >= SLOW * NETWORK else ""
    total = parts[ACTOR].plan.samples
    return [
        ("weights", f"{_size(weights)}, {what}, {to}{again}{time}"),
        ("samples", f"{_size(samples)} of {total} {task_of(cfg).samples}, from the rollout {way}"),
    ]


def _size(size: int) -> str:
    scale = Scale(size)
    return f"{scale.plain(size)} {scale.unit}"


def _messages(parts: Mapping[str, Planned]) -> Iterator[str]:
    items = [(role, item) for role, p in parts.items() for item in messages(p)]
    if not items:
        yield "  none"
        return
    scale = Scale(max(item.size for _, item in items))
    rows: list[Sequence[str]] = [(scale.unit, "within a node", "across nodes")]
    for role, item in items:
        size = scale(item.size)
        rows.append((f"{role}: {item.what}", *(("-", size) if item.nodes else (size, "-"))))
    yield from table(rows)
