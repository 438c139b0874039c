"""Wording of ranks, nodes and differences. `nodes` maps a node's name to its ranks, in the order of ranks."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from phalanx.cluster.facts import RankInfo
from phalanx.distributed.roles import span

Nodes = Mapping[str, Sequence[int]]


def name_nodes(infos: Iterable[RankInfo]) -> dict[str, list[int]]:
    """The ranks of each node, which is called by its host, and by its number if others are too."""
    by_place: dict[tuple[int, str], list[int]] = {}
    for info in sorted(infos, key=lambda info: info.rank):
        by_place.setdefault((info.node, info.host), []).append(info.rank)
    namesakes = Counter(host for _, host in by_place)
    nodes = {}
    for (node, host), ranks in by_place.items():
        nodes[f"{host} (node {node})" if namesakes[host] > 1 else host] = ranks
    return nodes


def listed(names: Sequence[str]) -> str:
    """`a, b and c`; of many, the first eight."""
    if len(names) > 8:
        return f"{', '.join(names[:8])} and {len(names) - 8} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def numbered(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 4-7`."""
    return f"rank{'s' * (len(ranks) > 1)} {span(ranks, ', ')}"


def on_nodes(nodes: Nodes, ranks: Collection[int]) -> str:
    """Some ranks with their nodes: `ranks 4-7 on b`."""
    parts = []
    for name, members in nodes.items():
        here = sorted(set(members).intersection(ranks))
        if here:
            parts.append(f"{numbered(here)} on {name}")
    return listed(parts)


def reason(error: Exception) -> str:
    """The first line of an error, without error numbers and places in C++ source."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.lower()}"
    line = str(error).strip().split("\n")[0]
    return re.sub(r"\[[^\]]*\.cc:\d+\] ", "", line).rstrip(".")


def difference(values: Mapping[str, str]) -> str | None:
    """The nodes with another value than most: `1 on b, but 2 on the others`. None if all agree."""
    nodes: dict[str, list[str]] = {}
    for name, value in values.items():
        nodes.setdefault(value, []).append(name)
    ranking = Counter(values.values()).most_common()
    if len(ranking) <= 1:
        return None
    common, times = ranking[0]
    parts = [f"{value} on {listed(nodes[value])}" for value, _ in reversed(ranking[1:])]
    rest = "the others" if times > 1 else listed(nodes[common])
    return f"{listed(parts)}, but {common} on {rest}"
