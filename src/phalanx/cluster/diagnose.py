"""From facts to findings: what is right, what is doubtful, and what would break training.

A finding is one line. `nodes` maps a node's name to its ranks, in the order of ranks; other
arguments go by the same names, or by rank. A check without a complaint says "ok" with what it has
seen.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.cluster.facts import ENOUGH, Gpu, GpuInfo, Machine, PathFact, RankInfo
from phalanx.cluster.messages import Nodes, count, difference, listed, numbered, on_nodes

OK, WARNING, FAIL = "ok", "warning", "FAIL"

MAX_SKEW_S = 1.0
SLOW = 0.6  # share of the median bandwidth below which a node is named
MIN_FREE_MEMORY = 0.1  # share of a machine's memory
MIN_SHM_GB = 1.0  # NCCL and data loaders exchange data there; containers start with 0.064
OPEN_FILES_PER_RANK = 32  # connections to one other rank, in all groups, with room to spare
# ranks that differ in one of these fail, or train something else; in another one they may well work
BREAKING = ("phalanx", "torch", "CUDA", "ROCm", "NCCL", "diffusers", "transformers", "peft")


@dataclass(frozen=True)
class Finding:
    """One line of the result."""

    level: str
    topic: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8} {self.topic}: {self.text}"


def absent(size: int, nodes: Nodes, seconds: float, address: str) -> Finding:
    """Name the ranks that did not come within `seconds`."""
    came = sorted(rank for members in nodes.values() for rank in members)
    lost = sorted(set(range(size)) - set(came))
    return Finding(
        FAIL,
        "ranks",
        f"{len(came)} of {size} came within {seconds:g} s: {on_nodes(nodes, came)}; "
        f"look at the logs of {numbered(lost)}, "
        f"and whether their machines reach {address} through the firewalls",
    )


def regular(nodes: Nodes, infos: Iterable[RankInfo]) -> bool:
    """True if nodes have as many ranks as their launchers say, each with consecutive numbers."""
    sizes = {len(members) for members in nodes.values()}
    sizes |= {info.local_world_size for info in infos}
    return len(sizes) == 1 and all(_consecutive(members) for members in nodes.values())


def _consecutive(members: Sequence[int]) -> bool:
    return members[-1] - members[0] < len(members)


def ranks(nodes: Nodes, infos: Sequence[RankInfo], expect: int | None) -> Iterator[Finding]:
    """Compare the number of ranks with `expect`, and the nodes with each other."""
    size = sum(len(members) for members in nodes.values())
    shares = listed([f"{len(members)} on {name}" for name, members in nodes.items()])
    found = []
    if expect is not None and size != expect:
        text = f"{size} came, but expect={expect}: {shares}"
        text += "; check NNODES and NPROC_PER_NODE on every node"
        found.append(Finding(FAIL, "ranks", text))
    odd = difference({name: str(len(members)) for name, members in nodes.items()})
    if odd is not None:
        text = f"{odd}; give every node the same NPROC_PER_NODE"
        found.append(Finding(FAIL, "ranks", text))
    elif not all(_consecutive(members) for members in nodes.values()):
        text = on_nodes(nodes, range(size))
        text += "; number them node by node, as srun --distribution=block does"
        found.append(Finding(FAIL, "ranks", text))
    elif not regular(nodes, infos):
        per_node = size // len(nodes)
        told = [info.local_world_size for info in infos if info.local_world_size != per_node]
        text = f"{shares}, but LOCAL_WORLD_SIZE={told[0]}"
        text += "; the launcher must set it to the number of ranks on a node"
        found.append(Finding(FAIL, "ranks", text))
    each = f", {size // len(nodes)} on each" if len(nodes) > 1 else ""
    yield from found or [Finding(OK, "ranks", f"{size} on {count(len(nodes), 'node')}{each}")]


def versions(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Compare the software of all nodes."""
    first = next(iter(machines.values())).versions
    same = []
    for name, value in first.items():
        odd = difference({node: machine.versions[name] for node, machine in machines.items()})
        if odd is not None:
            level = FAIL if name in BREAKING else WARNING
            text = f"{name} is {odd}; install the same one on all nodes"
            yield Finding(level, "versions", text)
        elif value != "none":
            same.append(f"{name} {value}")
    yield Finding(OK, "versions", _on_all(", ".join(same), machines))


def settings(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Compare the configurations that the nodes were given."""
    keys: set[str] = set()
    for machine in machines.values():
        keys |= machine.settings.keys()
    found = []
    for key in sorted(keys):
        values = {}
        for node, machine in machines.items():
            values[node] = machine.settings[key] if key in machine.settings else "not set"
        odd = difference(values)
        if odd is not None:
            text = f"{key} is {odd}; give every node the same file and overrides"
            found.append(Finding(FAIL, "configuration", text))
    text = _on_all(count(len(keys), "key"), machines)
    yield from found or [Finding(OK, "configuration", text)]


def gpus(nodes: Nodes, infos: Mapping[int, GpuInfo]) -> Iterator[Finding]:
    """Look for ranks without a GPU, shared or occupied GPUs, and nodes with other ones."""
    if not any(info.visible for info in infos.values()):
        yield Finding(OK, "GPUs", "none; all ranks run on CPUs")
        return
    owned = {rank: info.gpu for rank, info in infos.items() if info.gpu is not None}
    found = []
    bare = [rank for rank in infos if rank not in owned]
    if bare:
        text = f"none for {on_nodes(nodes, bare)}, where torch sees {infos[bare[0]].visible}"
        text += "; lower NPROC_PER_NODE, or check nvidia-smi and CUDA_VISIBLE_DEVICES there"
        found.append(Finding(FAIL, "GPUs", text))
    kinds: dict[str, str] = {}
    for name, members in nodes.items():
        here = {rank: owned[rank] for rank in members if rank in owned}
        found += _gpus_of(name, here)
        models = Counter(gpu.name for gpu in here.values())
        kinds[name] = ", ".join(f"{number} x {model}" for model, number in models.items())
    odd = difference({name: kind for name, kind in kinds.items() if kind})
    if odd is not None:
        text = f"{odd}; the slowest sets the pace, the smallest the batch"
        found.append(Finding(WARNING, "GPUs", text))
    first = kinds[next(iter(nodes))]
    text = f"{first} on each node, {100 * ENOUGH:g} % or more of their memory free"
    yield from found or [Finding(OK, "GPUs", text)]


def _gpus_of(name: str, owned: Mapping[int, Gpu]) -> Iterator[Finding]:
    """Look for GPUs of one node that several ranks share, or that other processes use."""
    by_uuid: dict[str, list[int]] = {}
    for rank, gpu in owned.items():
        by_uuid.setdefault(gpu.uuid, []).append(rank)
    for sharing in by_uuid.values():
        if len(sharing) > 1:
            text = f"{numbered(sharing)} on {name} share one"
            text += "; each needs a LOCAL_RANK of its own, and must see all GPUs of the node"
            yield Finding(FAIL, "GPUs", text)
    low = {rank: gpu for rank, gpu in owned.items() if gpu.free_gb < ENOUGH * gpu.memory_gb}
    if low:
        worst = min(low.values(), key=lambda gpu: gpu.free_gb)
        users = f", held by {worst.users}" if worst.users else ""
        free = f"{worst.free_gb:.1f} of {worst.memory_gb:.1f} GB free{users}"
        text = f"{numbered(list(low))} on {name}: {free}; stop what else runs there"
        yield Finding(WARNING, "GPUs", text)


def memory(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Check the main memory and /dev/shm."""
    found = []
    for name, m in machines.items():
        if m.memory_free_gb < MIN_FREE_MEMORY * m.memory_gb:
            text = f"{m.memory_free_gb:.1f} of {m.memory_gb:.1f} GB free on {name}"
            text += "; stop what else runs there"
            found.append(Finding(WARNING, "memory", text))
        if m.shm_free_gb < MIN_SHM_GB:
            text = f"{m.shm_free_gb:.2f} GB free in /dev/shm on {name}"
            text += f"; NCCL needs {MIN_SHM_GB:g} GB: "
            text += "start the container with --shm-size=16g or --ipc=host"
            found.append(Finding(WARNING, "memory", text))
    least = min(m.memory_free_gb for m in machines.values())
    shm = min(m.shm_free_gb for m in machines.values())
    each = " on each node" if len(machines) > 1 else ""
    text = f"{least:.1f} GB free, {shm:.1f} GB in /dev/shm{each}"
    yield from found or [Finding(OK, "memory", text)]


def limits(machines: Mapping[str, Machine], size: int) -> Iterator[Finding]:
    """Check what the operating system allows a process; `size` is the number of ranks."""
    need = max(1024, OPEN_FILES_PER_RANK * size)
    found = []
    least = min(m.open_files for m in machines.values())
    few = [name for name, m in machines.items() if m.open_files < need]
    if few:
        text = f"{least} open files on {listed(few)}; "
        text += f"{size} ranks may need {need}: ulimit -n {need}"
        found.append(Finding(WARNING, "limits", text))
    # InfiniBand writes into memory that must not be paged out
    locked = [name for name, m in machines.items() if m.infiniband and m.locked_gb is not None]
    if locked:
        text = f"there is InfiniBand, but locked memory is limited on {listed(locked)}: "
        text += "ulimit -l unlimited, or memlock in /etc/security/limits.conf"
        found.append(Finding(WARNING, "limits", text))
    yield from found or [Finding(OK, "limits", f"{least} open files")]


def paths(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Compare the model and data that the nodes read."""
    keys = dict.fromkeys(key for machine in machines.values() for key in machine.paths)
    right = []
    for key in keys:
        facts = {name: m.paths[key] for name, m in machines.items() if key in m.paths}
        found = list(_path(key, facts))
        yield from found
        if not found:
            right.append(key)
    if right:
        yield Finding(OK, "paths", _on_all(f"{listed(right)} can be read", machines))
    if not keys:
        text = "nothing to check; give model.path and data.train_files, or a training configuration"
        yield Finding(OK, "paths", text)


def _path(key: str, facts: Mapping[str, PathFact]) -> Iterator[Finding]:
    problems: dict[str, list[str]] = {}
    remote = []
    sizes = {}
    for name, fact in facts.items():
        if fact.problem is not None:
            problems.setdefault(fact.problem, []).append(name)
        elif fact.here:
            sizes[name] = f"{fact.size} bytes"
        else:
            remote.append(name)
    for problem, names in problems.items():
        yield Finding(FAIL, "paths", f"{key}: {problem} (on {listed(names)})")
    if remote:
        path = facts[remote[0]].path
        text = f"{key}: {path} is incomplete in the hub's cache of {listed(remote)}; "
        text += f"every rank there would download it: run hf download {path} there first"
        yield Finding(WARNING, "paths", text)
    odd = difference(sizes) if sizes else None
    if odd is not None:
        first = next(iter(facts.values())).path
        yield Finding(FAIL, "paths", f"{key}: {first} has {odd}; copy it again, or share it")


def disk(machines: Mapping[str, Machine], folder: str, min_free_gb: float) -> Iterator[Finding]:
    """Check the room for checkpoints."""
    low = [name for name, m in machines.items() if m.disk_free_gb < min_free_gb]
    least = min(m.disk_free_gb for m in machines.values())
    if low:
        text = f"{least:.1f} GB free at {folder} on {listed(low)}, "
        text += f"less than min_free_gb={min_free_gb:g}; checkpoints may not fit"
        yield Finding(WARNING, "disk", text)
    else:
        yield Finding(OK, "disk", f"{least:.1f} GB free at {folder}")


def shared(folder: str, unseen: Mapping[str, Sequence[str]], seconds: float) -> Finding:
    """Check that output_dir is one folder; `unseen` by node: others whose files it does not see."""
    blind = []
    for name, others in unseen.items():
        if others:
            blind.append(f"{name} does not see what {listed(others)} wrote")
    if blind:
        text = f"{folder}: {listed(blind)} within {seconds:g} s"
        text += "; trainer.output_dir must be on a file system that all nodes share"
        return Finding(FAIL, "shared disk", text)
    same = " and is the same on all nodes" if len(unseen) > 1 else ""
    return Finding(OK, "shared disk", f"{folder} can be written{same}")


def clocks(ahead: Mapping[str, float]) -> Iterator[Finding]:
    """Compare clocks; `ahead` are seconds ahead of the first node's."""
    first = next(iter(ahead))
    for name, seconds in ahead.items():
        if abs(seconds) > MAX_SKEW_S:
            side = "ahead of" if seconds > 0 else "behind"
            text = f"{name} is {abs(seconds):.1f} s {side} {first}"
            text += "; logs and file times will not match: run an NTP client (chrony)"
            yield Finding(WARNING, "clocks", text)
    worst = max(abs(seconds) for seconds in ahead.values())
    if len(ahead) > 1 and worst <= MAX_SKEW_S:
        yield Finding(OK, "clocks", f"within {max(worst, 0.001):.3f} s of {first}")


def sums(nodes: Nodes, problems: Mapping[int, str | None]) -> Finding:
    """Report ranks to which an all-reduce gave wrong numbers."""
    wrong = {rank: problem for rank, problem in problems.items() if problem is not None}
    if not wrong:
        return Finding(OK, "all-reduce", f"correct on {count(len(problems), 'rank')}")
    text = f"wrong on {on_nodes(nodes, wrong)}: {next(iter(wrong.values()))}"
    text += "; suspect a GPU, a cable or the network's driver"
    return Finding(FAIL, "all-reduce", text)


def bandwidths(nodes: Nodes, measured: Mapping[int, Mapping[str, float]]) -> Iterator[Finding]:
    """Report the speed of the network, and nodes that are much slower than most."""
    inside: dict[str, float] = {}
    links: dict[str, float] = {}
    for name, members in nodes.items():
        first = measured[members[0]]
        if "node" in first:
            inside[name] = first["node"]
        if "link" in first:  # all ranks of a node receive at once
            links[name] = sum(measured[rank]["link"] for rank in members)
    if "all" in measured[0]:
        slowest = min(rates["all"] for rates in measured.values())
        texts = [f"all-reduce over all ranks {slowest:.3g} GB/s"]
        if inside and links:  # on one node, the first figure is this one
            texts.append(f"inside a node {statistics.median(inside.values()):.3g} GB/s")
        if links:
            texts.append(f"from node to node {statistics.median(links.values()):.3g} GB/s")
        yield Finding(OK, "bandwidth", ", ".join(texts))
    names = list(nodes)
    for name, median in _slow(inside):
        text = f"{name} has {inside[name]:.3g} GB/s inside, the median is {median:.3g}"
        yield Finding(WARNING, "bandwidth", f"{text}; all nodes will wait")
    for name, median in _slow(links):
        sender = names[names.index(name) - 1]
        text = f"{name} gets {links[name]:.3g} GB/s from {sender}, the median is {median:.3g}"
        yield Finding(WARNING, "bandwidth", f"{text}; all nodes will wait")


def _slow(figures: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The nodes that are far below the median, with the median."""
    for name, figure in figures.items():
        median = statistics.median(figures.values())
        if figure < SLOW * median:
            yield name, median


def _on_all(text: str, machines: Mapping[str, Machine]) -> str:
    return f"{text}, the same on all nodes" if len(machines) > 1 else text
