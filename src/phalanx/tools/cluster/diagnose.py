"""Turns facts into findings: what is fine, what is doubtful, and what would break training.

A finding is one line. `nodes` maps the names of nodes to their ranks, in rank order; other arguments are keyed by node
name or by rank. A check without complaints returns a finding "ok" with the observed values.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.config.messages import counted
from phalanx.distributed.mesh import ACTOR
from phalanx.run.roles import Roles
from phalanx.tools.cluster.facts import ENOUGH, Gpu, Machine, PathFact, RankInfo
from phalanx.tools.cluster.wording import Nodes, difference, listed, numbered, on_nodes

OK, WARNING, FAIL = "ok", "warning", "FAIL"

MAX_SKEW_S = 1.0
SLOW = 0.6  # fraction of the median bandwidth below which a node is reported
MIN_FREE_MEMORY = 0.1  # fraction of a machine's memory
MIN_SHM_GB = 1.0  # used by NCCL and data loaders; the default of containers is 0.064
OPEN_FILES_PER_RANK = 32  # connections to another rank over all groups, with a margin
# differences between nodes in one of these break training or change it; differences in other software may be harmless
BREAKING = ("phalanx", "torch", "CUDA", "ROCm", "NCCL", "diffusers", "transformers", "peft")

Machines = Mapping[str, Machine]
Rates = Mapping[int, Mapping[str, float]]  # the results of `measure.bandwidths` by rank


@dataclass(frozen=True)
class Finding:
    """One line of the check's output."""

    level: str
    topic: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8} {self.topic}: {self.text}"


def any_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level == FAIL for finding in findings)


class Topic:
    """The findings on one topic."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[Finding] = []

    def add(self, level: str, text: str) -> None:
        self.findings.append(Finding(level, self.name, text))

    def fail(self, text: str) -> None:
        self.add(FAIL, text)

    def warn(self, text: str) -> None:
        self.add(WARNING, text)

    def or_ok(self, text: str) -> list[Finding]:
        """The complaints, or a single finding `ok` with this text if there are none."""
        return self.findings or [Finding(OK, self.name, text)]


def absent(size: int, nodes: Nodes, seconds: float, address: str) -> Finding:
    """Report the ranks that did not register within `seconds`."""
    came = set[int]().union(*nodes.values())
    lost = sorted(set(range(size)) - came)
    there = f"{len(came)} of {size} came within {seconds:g} s: {on_nodes(nodes, came)}"
    advice = f"look at the logs of {numbered(lost)}, and whether their machines reach {address} through the firewalls"
    return Finding(FAIL, "ranks", f"{there}; {advice}")


def ranks(nodes: Nodes, infos: Sequence[RankInfo], expect: int | None = None) -> list[Finding]:
    """Compare the number of ranks with `expect`, and the nodes with each other."""
    topic = Topic("ranks")
    size = len(infos)
    per_node = size // len(nodes)
    counts, shares, scattered = {}, [], False
    for name, members in nodes.items():
        counts[name] = str(len(members))
        shares.append(f"{len(members)} on {name}")
        scattered |= members[-1] - members[0] >= len(members)
    wrong = [info.local_world_size for info in infos if info.local_world_size != per_node]
    if expect is not None and size != expect:
        topic.fail(f"{size} came, but expect={expect}: {listed(shares)}; check NNODES and NPROC_PER_NODE on every node")
    odd = difference(counts)
    if odd is not None:
        topic.fail(f"{odd}; give every node the same NPROC_PER_NODE")
    elif scattered:
        topic.fail(f"{on_nodes(nodes, range(size))}; number them node by node, as srun --distribution=block does")
    elif wrong:
        advice = "the launcher must set it to the number of ranks on a node"
        topic.fail(f"{listed(shares)}, but LOCAL_WORLD_SIZE={wrong[0]}; {advice}")
    each = f", {per_node} on each" if len(nodes) > 1 else ""
    return topic.or_ok(f"{size} on {counted(len(nodes), 'node')}{each}")


def placement(roles: Roles) -> list[Finding]:
    """List the ranks of each role."""
    return Topic("placement").or_ok(", ".join([f"{role} {numbered(ranks)}" for role, ranks in roles.ranks.items()]))


def versions(machines: Machines) -> list[Finding]:
    """Compare the software of all nodes."""
    topic = Topic("versions")
    same = []
    for name, value in next(iter(machines.values())).versions.items():
        odd = difference({node: machine.versions[name] for node, machine in machines.items()})
        if odd is not None:
            level = FAIL if name in BREAKING else WARNING
            topic.add(level, f"{name} is {odd}; install the same one on all nodes")
        elif value != "none":
            same.append(f"{name} {value}")
    topic.add(OK, _on_all(", ".join(same), machines))
    return topic.findings


def settings(machines: Machines) -> list[Finding]:
    """Compare the nodes' configurations."""
    topic = Topic("configuration")
    keys: set[str] = set()
    for machine in machines.values():
        keys |= machine.settings.keys()
    for key in sorted(keys):
        odd = difference({node: machine.settings.get(key, "not set") for node, machine in machines.items()})
        if odd is not None:
            topic.fail(f"{key} is {odd}; give every node the same file and overrides")
    return topic.or_ok(_on_all(counted(len(keys), "key"), machines))


def gpus(nodes: Nodes, infos: Mapping[int, Gpu]) -> list[Finding]:
    """Look for ranks without a GPU, GPUs that are shared or in use, and nodes with different GPUs."""
    topic = Topic("GPUs")
    bare = [rank for rank, gpu in infos.items() if not gpu.name]
    if max(infos.values(), key=lambda gpu: gpu.visible).visible == 0:
        return topic.or_ok("none; all ranks run on CPUs")
    if bare:
        topic.fail(
            f"none for {on_nodes(nodes, bare)}, where torch sees {infos[bare[0]].visible}; "
            "lower NPROC_PER_NODE, or check nvidia-smi and CUDA_VISIBLE_DEVICES there"
        )
    kinds: dict[str, str] = {}
    for name, members in nodes.items():
        here = {rank: infos[rank] for rank in members if infos[rank].name}
        _gpus_of(name, here, topic)
        if here:
            models = Counter(gpu.name for gpu in here.values())
            kinds[name] = ", ".join([f"{number} x {model}" for model, number in models.items()])
    odd = difference(kinds)
    if odd is not None:
        topic.warn(f"{odd}; the slowest sets the pace, the smallest the batch")
    first = next(iter(kinds.values()), "")
    return topic.or_ok(f"{first} on each node, {100 * ENOUGH:g} % or more of their memory free")


def _gpus_of(name: str, owned: Mapping[int, Gpu], topic: Topic) -> None:
    """Look for GPUs of a node that several ranks share or that other processes use."""
    by_uuid: dict[str, list[int]] = {}
    for rank, gpu in owned.items():
        by_uuid.setdefault(gpu.uuid, []).append(rank)
    for sharing in by_uuid.values():
        if len(sharing) > 1:
            advice = "each needs its own LOCAL_RANK, and must see all GPUs of the node"
            topic.fail(f"{numbered(sharing)} on {name} share one; {advice}")
    low = [rank for rank, gpu in owned.items() if gpu.free_gb < ENOUGH * gpu.memory_gb]
    if low:
        worst = min([owned[rank] for rank in low], key=lambda gpu: gpu.free_gb)
        users = f", held by {worst.users}" if worst.users else ""
        free = f"{worst.free_gb:.1f} of {worst.memory_gb:.1f} GB free{users}"
        topic.warn(f"{numbered(low)} on {name}: {free}; stop what else runs there")


def memory(machines: Machines) -> list[Finding]:
    """Check main memory and /dev/shm."""
    topic = Topic("memory")
    for name, m in machines.items():
        if m.memory_free_gb < MIN_FREE_MEMORY * m.memory_gb:
            topic.warn(f"{m.memory_free_gb:.1f} of {m.memory_gb:.1f} GB free on {name}; stop what else runs there")
        if m.shm_free_gb is not None and m.shm_free_gb < MIN_SHM_GB:
            advice = f"NCCL needs {MIN_SHM_GB:g} GB: start the container with --shm-size=16g or --ipc=host"
            topic.warn(f"{m.shm_free_gb:.2f} GB free in /dev/shm on {name}; {advice}")
    least = min(machines.values(), key=lambda m: m.memory_free_gb).memory_free_gb
    shared = [m.shm_free_gb for m in machines.values() if m.shm_free_gb is not None]
    each = " on each node" if len(machines) > 1 else ""
    return topic.or_ok(f"{least:.1f} GB free{f', {min(shared):.1f} GB in /dev/shm' if shared else ''}{each}")


def limits(machines: Machines, size: int) -> list[Finding]:
    """Check the operating system's limits on a process; `size` is the number of ranks."""
    topic = Topic("limits")
    need = max(1024, OPEN_FILES_PER_RANK * size)
    least = min(machines.values(), key=lambda m: m.open_files).open_files
    few, locked = [], []
    unused: dict[str, list[str]] = {}  # names of nodes by reason
    for name, m in machines.items():
        if m.open_files < need:
            few.append(name)
        if m.infiniband and m.locked_gb is not None:  # InfiniBand requires memory that is locked against paging
            locked.append(name)
        if m.infiniband_unused is not None and len(machines) > 1:
            unused.setdefault(m.infiniband_unused, []).append(name)
    if few:
        topic.warn(f"{least} open files on {listed(few)}; {size} ranks may need {need}: ulimit -n {need}")
    if locked:
        advice = "ulimit -l unlimited, or memlock in /etc/security/limits.conf"
        topic.warn(f"there is InfiniBand, but locked memory is limited on {listed(locked)}: {advice}")
    for cause, names in unused.items():
        topic.warn(f"NCCL would use NET/Socket (TCP) although InfiniBand is there on {listed(names)}: {cause}")
    return topic.or_ok(f"{least} open files")


def paths(machines: Machines) -> list[Finding]:
    """Compare the models and data that the nodes read."""
    topic = Topic("paths")
    facts: dict[str, dict[str, PathFact]] = {}  # by key and node
    for name, machine in machines.items():
        for key, fact in machine.paths.items():
            facts.setdefault(key, {})[name] = fact
    right = []
    for key, by_node in facts.items():
        before = len(topic.findings)
        _compare_path(key, by_node, topic)
        if len(topic.findings) == before:
            right.append(key)
    if right:
        topic.add(OK, _on_all(f"{listed(right)} can be read", machines))
    return topic.or_ok("nothing to check; give model.path and data.train_files, or a training configuration")


def _compare_path(key: str, facts: Mapping[str, PathFact], topic: Topic) -> None:
    """Compare the nodes' facts of one path."""
    problems: dict[str, list[str]] = {}
    sizes, remote = {}, []
    for name, fact in facts.items():
        if fact.problem is not None:
            problems.setdefault(fact.problem, []).append(name)
        elif fact.here:
            sizes[name] = f"{fact.size} bytes"
        else:
            remote.append(name)
    for problem, names in problems.items():
        topic.fail(f"{key}: {problem} (on {listed(names)})")
    if remote:
        model = facts[remote[0]].path
        advice = f"every rank there would download it: run hf download {model} there first"
        topic.warn(f"{key}: {model} is incomplete in the hub's cache of {listed(remote)}; {advice}")
    odd = difference(sizes)
    if odd is not None:
        path = next(iter(facts.values())).path
        topic.fail(f"{key}: {path} has {odd}; copy it again, or share it")


def disk(machines: Machines, folder: str, min_free_gb: float) -> list[Finding]:
    """Check the disk space for checkpoints."""
    topic = Topic("disk")
    fullest = min(machines.values(), key=lambda m: m.disk_free_gb)
    least = f"{fullest.disk_free_gb:.1f} GB free at {folder}"
    low = [name for name, m in machines.items() if m.disk_free_gb < min_free_gb]
    if low:
        topic.warn(f"{least} on {listed(low)}, less than min_free_gb={min_free_gb:g}; checkpoints may not fit")
    return topic.or_ok(least)


def shared(folder: str, unseen: Mapping[str, Sequence[str]], seconds: float) -> list[Finding]:
    """Check that output_dir is the same folder on all nodes; `unseen` lists, by node, others whose files it misses."""
    topic = Topic("shared disk")
    blind = [f"{name} does not see what {listed(others)} wrote" for name, others in unseen.items() if others]
    if blind:
        advice = "trainer.output_dir must be on a file system that all nodes share"
        topic.fail(f"{folder}: {listed(blind)} within {seconds:g} s; {advice}")
    same = " and is the same on all nodes" if len(unseen) > 1 else ""
    return topic.or_ok(f"{folder} can be written{same}")


def _on_all(text: str, machines: Machines) -> str:
    return f"{text}, the same on all nodes" if len(machines) > 1 else text


def clocks(ahead: Mapping[str, float]) -> list[Finding]:
    """Compare clocks; `ahead` has the seconds by which each is ahead of the first node's."""
    topic = Topic("clocks")
    if len(ahead) == 1:
        return []
    first = next(iter(ahead))
    for name, seconds in ahead.items():
        if abs(seconds) > MAX_SKEW_S:
            skew = f"{name} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} {first}"
            topic.warn(f"{skew}; logs and file times will not match: run an NTP client (chrony)")
    worst = max(map(abs, ahead.values()))
    return topic.or_ok(f"within {max(worst, 0.001):.3f} s of {first}")


def sums(nodes: Nodes, problems: Mapping[int, str | None]) -> list[Finding]:
    """Report ranks that received wrong results from an all-reduce."""
    topic = Topic("all-reduce")
    wrong = [rank for rank, problem in problems.items() if problem is not None]
    if wrong:
        problem = problems[wrong[0]]
        topic.fail(f"wrong on {on_nodes(nodes, wrong)}: {problem}; suspect a GPU, a cable or the network's driver")
    return topic.or_ok(f"correct on {counted(len(problems), 'rank')}")


def bandwidths(nodes: Nodes, measured: Rates) -> list[Finding]:
    """Report the speed of the network, and nodes that are much slower than most."""
    topic = Topic("bandwidth")
    inside, links = by_node(nodes, measured)
    if "all" in measured[0]:
        slowest = min(measured.values(), key=lambda rates: rates["all"])
        text = f"all-reduce over all ranks {slowest['all']:.3g} GB/s"
        if inside and links:  # on a single node this would repeat the first figure
            text += f", inside a node {statistics.median(inside.values()):.3g} GB/s"
        if links:
            text += f", from node to node {statistics.median(links.values()):.3g} GB/s"
        topic.add(OK, text)
    for name, median in _slow_nodes(inside):
        topic.warn(f"{name} has {inside[name]:.3g} GB/s inside, the median is {median:.3g}; all nodes will wait")
    names = list(nodes)
    for name, median in _slow_nodes(links):
        link = f"{links[name]:.3g} GB/s from {names[names.index(name) - 1]}"
        topic.warn(f"{name} gets {link}, the median is {median:.3g}; all nodes will wait")
    return topic.findings


def roles(nodes: Nodes, placed: Roles, seconds: Mapping[int, float | None]) -> list[Finding]:
    """Report the transfer time of weights between roles, for the rank that receives them last."""
    known = {}
    for rank, value in seconds.items():
        if value is not None and placed.of(rank) != ACTOR:
            known[rank] = value
    last, first = max(known, key=lambda rank: known[rank]), placed.ranks[ACTOR][0]
    there = f"the {len(known)} ranks that sample or score" if len(known) > 1 else "the rank that samples"
    return Topic("roles").or_ok(
        f"weights from rank {first} to {there} in {known[last]:.3g} s per GB ({on_nodes(nodes, [last])})"
    )


def by_node(nodes: Nodes, measured: Rates) -> tuple[dict[str, float], dict[str, float]]:
    """GB per second inside each node, and from the preceding node; without entries that were not measured."""
    inside: dict[str, float] = {}
    links: dict[str, float] = {}
    for name, members in nodes.items():
        for rank in members:
            rates = measured.get(rank, {})
            if "node" in rates:
                inside.setdefault(name, rates["node"])
            if "link" in rates:  # sum over the node's ranks, which receive simultaneously
                links[name] = links.get(name, 0.0) + rates["link"]
    return inside, links


def _slow_nodes(figures: Mapping[str, float]) -> list[tuple[str, float]]:
    """The names of nodes far below the median, each with the median."""
    median = statistics.median(figures.values() or [0.0])
    return [(name, median) for name, figure in figures.items() if figure < SLOW * median]
