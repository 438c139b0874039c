"""From facts to findings: what is right, what is doubtful, and what would break training, each in one line.

`nodes` maps a node's name to its ranks, in the order of ranks; other arguments go by the same names, or by rank.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.cluster.facts import ENOUGH, Gpu, Machine, PathFact, Place, Seat
from phalanx.cluster.words import Nodes, count, difference, listed, numbered, on_nodes

OK, WARNING, FAIL = "ok", "warning", "FAIL"

MAX_SKEW_S = 1.0
SLOW = 0.6  # share of the median bandwidth below which a node is named
MIN_FREE_MEMORY = 0.1  # share of a machine's memory
MIN_SHM_GB = 1.0  # NCCL and data loaders exchange data there; containers start with 0.064
OPEN_FILES_A_RANK = 32  # connections of one rank to another, over all groups, with room to spare
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
    """Ranks that did not come within `seconds`."""
    came = sorted(rank for ranks in nodes.values() for rank in ranks)
    lost = [rank for rank in range(size) if rank not in came]
    return Finding(
        FAIL,
        "ranks",
        f"{len(came)} of {size} came within {seconds:g} s: {on_nodes(nodes, came)}; look at the logs of "
        f"{numbered(lost)}, and whether their machines reach {address} through the firewalls",
    )


def regular(nodes: Nodes, places: Iterable[Place]) -> bool:
    """Whether each node has the same number of ranks, one after the other, which is what the launcher tells them."""
    sizes = {len(members) for members in nodes.values()} | {place.local_world_size for place in places}
    return len(sizes) == 1 and all(members[-1] - members[0] < len(members) for members in nodes.values())


def ranks(nodes: Nodes, places: Sequence[Place], expect: int | None) -> Iterator[Finding]:
    """Whether as many came as expected, equally many on each node."""
    size, found = sum(map(len, nodes.values())), []
    if expect is not None and size != expect:
        text = f"{size} came, but expect={expect}: {_shares(nodes)}; check NNODES and NPROC_PER_NODE on every node"
        found.append(Finding(FAIL, "ranks", text))
    odd = difference({name: str(len(members)) for name, members in nodes.items()})
    if odd is not None:
        found.append(Finding(FAIL, "ranks", f"{odd}; give every node the same NPROC_PER_NODE"))
    elif any(members[-1] - members[0] >= len(members) for members in nodes.values()):
        text = on_nodes(nodes, range(size))
        found.append(Finding(FAIL, "ranks", f"{text}; number them node by node, as srun --distribution=block does"))
    elif not regular(nodes, places):
        told = [place.local_world_size for place in places if place.local_world_size != size // len(nodes)]
        text = f"{_shares(nodes)}, but LOCAL_WORLD_SIZE={told[0]}"
        found.append(Finding(FAIL, "ranks", f"{text}; the launcher must set it to the number of ranks on a node"))
    each = f", {size // len(nodes)} on each" if len(nodes) > 1 else ""
    yield from found or [Finding(OK, "ranks", f"{size} on {count(len(nodes), 'node')}{each}")]


def _shares(nodes: Nodes) -> str:
    return listed([f"{len(members)} on {name}" for name, members in nodes.items()])


def versions(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Whether all nodes run the same software."""
    first = next(iter(machines.values())).versions
    same = []
    for name, value in first.items():
        odd = difference({node: machine.versions[name] for node, machine in machines.items()})
        if odd is not None:
            level = FAIL if name in BREAKING else WARNING
            yield Finding(level, "versions", f"{name} is {odd}; install the same one on all nodes")
        elif value != "none":
            same.append(f"{name} {value}")
    yield Finding(OK, "versions", _on_all(", ".join(same), machines))


def settings(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Whether all nodes were given the same configuration."""
    keys, found = sorted({key for machine in machines.values() for key in machine.settings}), []
    for key in keys:
        odd = difference({node: m.settings[key] if key in m.settings else "not set" for node, m in machines.items()})
        if odd is not None:
            found.append(Finding(FAIL, "configuration", f"{key} is {odd}; give every node the same file and overrides"))
    yield from found or [Finding(OK, "configuration", _on_all(count(len(keys), "key"), machines))]


def gpus(nodes: Nodes, seats: Mapping[int, Seat]) -> Iterator[Finding]:
    """Whether every rank has a GPU of its own, of one kind, with nobody else in its memory."""
    if not any(seat.visible for seat in seats.values()):
        yield Finding(OK, "GPUs", "none; all ranks run on CPUs")
        return
    owned = {rank: seat.gpu for rank, seat in seats.items() if seat.gpu is not None}
    found = []
    bare = [rank for rank in seats if rank not in owned]
    if bare:
        text = f"none for {on_nodes(nodes, bare)}, where torch sees {seats[bare[0]].visible}"
        text += "; lower NPROC_PER_NODE, or look at nvidia-smi and CUDA_VISIBLE_DEVICES there"
        found.append(Finding(FAIL, "GPUs", text))
    for name, members in nodes.items():
        found += _gpus_of(name, {rank: owned[rank] for rank in members if rank in owned})
    kinds = {}
    for name, members in nodes.items():
        models = Counter(owned[rank].name for rank in members if rank in owned)
        kinds[name] = ", ".join(f"{number} x {model}" for model, number in models.items())
    odd = difference({name: kind for name, kind in kinds.items() if kind})
    if odd is not None:
        found.append(Finding(WARNING, "GPUs", f"{odd}; the slowest sets the pace, the smallest the batch"))
    text = f"{kinds[next(iter(nodes))]} on each node, {100 * ENOUGH:g} % or more of their memory free"
    yield from found or [Finding(OK, "GPUs", text)]


def _gpus_of(name: str, owned: Mapping[int, Gpu]) -> Iterator[Finding]:
    """GPUs of one node that several ranks share, or that others use."""
    for uuid in dict.fromkeys(gpu.uuid for gpu in owned.values()):
        sharing = [rank for rank, gpu in owned.items() if gpu.uuid == uuid]
        if len(sharing) > 1:
            text = f"{numbered(sharing)} on {name} share one; each needs a LOCAL_RANK of its own"
            yield Finding(FAIL, "GPUs", f"{text}, and all GPUs of the node in sight")
    low = [rank for rank, gpu in owned.items() if gpu.free_gb < ENOUGH * gpu.memory_gb]
    if low:
        worst = min((owned[rank] for rank in low), key=lambda gpu: gpu.free_gb)
        users = f", held by {worst.users}" if worst.users else ""
        text = f"{numbered(low)} on {name}: {worst.free_gb:.1f} of {worst.memory_gb:.1f} GB free"
        yield Finding(WARNING, "GPUs", f"{text}{users}; end what else runs there")


def memory(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Main memory and /dev/shm."""
    found = []
    for name, m in machines.items():
        if m.memory_free_gb < MIN_FREE_MEMORY * m.memory_gb:
            text = f"{m.memory_free_gb:.1f} of {m.memory_gb:.1f} GB free on {name}; end what else runs there"
            found.append(Finding(WARNING, "memory", text))
        if m.shm_free_gb < MIN_SHM_GB:
            text = f"{m.shm_free_gb:.2f} GB free in /dev/shm on {name}; NCCL wants {MIN_SHM_GB:g} GB: start the "
            found.append(Finding(WARNING, "memory", f"{text}container with --shm-size=16g or --ipc=host"))
    least = min(m.memory_free_gb for m in machines.values())
    shm = min(m.shm_free_gb for m in machines.values())
    each = " on each node" if len(machines) > 1 else ""
    yield from found or [Finding(OK, "memory", f"{least:.1f} GB free, {shm:.1f} GB in /dev/shm{each}")]


def limits(machines: Mapping[str, Machine], size: int) -> Iterator[Finding]:
    """What the operating system allows a process."""
    need, found = max(1024, OPEN_FILES_A_RANK * size), []
    least = min(m.open_files for m in machines.values())
    few = [name for name, m in machines.items() if m.open_files < need]
    if few:
        text = f"{least} open files on {listed(few)}; {size} ranks may need {need}: ulimit -n {need}"
        found.append(Finding(WARNING, "limits", text))
    locked = [name for name, m in machines.items() if m.infiniband and m.locked_gb is not None]
    if locked:
        text = f"there is InfiniBand, but locked memory is limited on {listed(locked)}"
        found.append(
            Finding(WARNING, "limits", f"{text}: ulimit -l unlimited, or memlock in /etc/security/limits.conf")
        )
    yield from found or [Finding(OK, "limits", f"{least} open files")]


def paths(machines: Mapping[str, Machine]) -> Iterator[Finding]:
    """Whether every node reads the same model and data."""
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
        yield Finding(OK, "paths", "none to look at; give model.path and data.train_files, or a training configuration")


def _path(key: str, facts: Mapping[str, PathFact]) -> Iterator[Finding]:
    problems: dict[str, list[str]] = {}
    for name, fact in facts.items():
        if fact.problem is not None:
            problems.setdefault(fact.problem, []).append(name)
    for problem, names in problems.items():
        yield Finding(FAIL, "paths", f"{key}: {problem} (on {listed(names)})")
    absent = [name for name, fact in facts.items() if not fact.here]
    if absent:
        path = facts[absent[0]].path
        text = f"{key}: {path} is not whole in the hub's cache of {listed(absent)}; every rank there would download it"
        yield Finding(WARNING, "paths", f"{text}: run hf download {path} there first")
    sizes = {name: f"{f.size} bytes" for name, f in facts.items() if f.problem is None and f.here}
    odd = difference(sizes) if sizes else None
    if odd is not None:
        yield Finding(FAIL, "paths", f"{key}: {next(iter(facts.values())).path} has {odd}; copy it anew, or share it")


def disk(machines: Mapping[str, Machine], folder: str, min_free_gb: float) -> Iterator[Finding]:
    """Whether there is room for checkpoints."""
    low = {name: m.disk_free_gb for name, m in machines.items() if m.disk_free_gb < min_free_gb}
    least = min(m.disk_free_gb for m in machines.values())
    if low:
        text = f"{least:.1f} GB free at {folder} on {listed(list(low))}, less than min_free_gb={min_free_gb:g}"
        yield Finding(WARNING, "disk", f"{text}; checkpoints may not fit")
    else:
        yield Finding(OK, "disk", f"{least:.1f} GB free at {folder}")


def shared(folder: str, unseen: Mapping[str, Sequence[str]], seconds: float) -> Finding:
    """Whether output_dir is one folder; `unseen` are the nodes whose files a node does not see."""
    blind = {name: others for name, others in unseen.items() if others}
    if not blind:
        text = f"{folder} can be written" + (" and is the same on all nodes" if len(unseen) > 1 else "")
        return Finding(OK, "shared disk", text)
    text = listed([f"{name} does not see what {listed(others)} wrote" for name, others in blind.items()])
    return Finding(
        FAIL,
        "shared disk",
        f"{folder}: {text} within {seconds:g} s; trainer.output_dir must be on a file system that all nodes share",
    )


def clocks(ahead: Mapping[str, float]) -> Iterator[Finding]:
    """Whether clocks agree; `ahead` are seconds ahead of the first node's."""
    first = next(iter(ahead))
    for name, seconds in ahead.items():
        if abs(seconds) > MAX_SKEW_S:
            text = f"{name} is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} {first}"
            yield Finding(WARNING, "clocks", f"{text}; logs and file times will not match: run an NTP client (chrony)")
    if len(ahead) > 1 and all(abs(seconds) <= MAX_SKEW_S for seconds in ahead.values()):
        worst = max(map(abs, ahead.values()))
        yield Finding(OK, "clocks", f"within {max(worst, 0.001):.3f} s of {first}")


def sums(nodes: Nodes, problems: Mapping[int, str | None]) -> Finding:
    """Whether an all-reduce gives every rank the right numbers."""
    wrong = {rank: problem for rank, problem in problems.items() if problem is not None}
    if not wrong:
        return Finding(OK, "all-reduce", f"right on {count(len(problems), 'rank')}")
    text = f"wrong on {on_nodes(nodes, wrong)}: {next(iter(wrong.values()))}"
    return Finding(FAIL, "all-reduce", f"{text}; suspect a GPU, a cable or the network's driver")


def bandwidths(nodes: Nodes, measured: Mapping[int, Mapping[str, float]]) -> Iterator[Finding]:
    """How fast the network is, and which node is much slower than most."""
    inside = {name: measured[r[0]]["node"] for name, r in nodes.items() if "node" in measured[r[0]]}
    links = {n: sum(measured[r]["link"] for r in ranks) for n, ranks in nodes.items() if "link" in measured[ranks[0]]}
    if "all" in measured[0]:
        texts = [f"all-reduce over all ranks {min(m['all'] for m in measured.values()):.3g} GB/s"]
        if inside and links:
            texts += [f"inside a node {statistics.median(inside.values()):.3g} GB/s"]
        if links:
            texts += [f"from node to node {statistics.median(links.values()):.3g} GB/s"]
        yield Finding(OK, "bandwidth", ", ".join(texts))
    names = list(nodes)
    for name in _slow(inside):
        median = statistics.median(inside.values())
        text = f"{name} has {inside[name]:.3g} GB/s inside, the median is {median:.3g}; all nodes will wait"
        yield Finding(WARNING, "bandwidth", text)
    for name in _slow(links):
        sender, median = names[names.index(name) - 1], statistics.median(links.values())
        text = f"{name} gets {links[name]:.3g} GB/s from {sender}, the median is {median:.3g}; all nodes will wait"
        yield Finding(WARNING, "bandwidth", text)


def _slow(figures: Mapping[str, float]) -> list[str]:
    return [name for name, figure in figures.items() if figure < SLOW * statistics.median(figures.values())]


def _on_all(text: str, machines: Mapping[str, Machine]) -> str:
    return f"{text}, the same on all nodes" if len(machines) > 1 else text
