"""Formatting of ranks, nodes and differences. `nodes` maps the names of nodes to their ranks, in rank order."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from phalanx.run.roles import span
from phalanx.tools.cluster.facts import RankInfo

Nodes = Mapping[str, Sequence[int]]


def name_nodes(infos: Iterable[RankInfo]) -> dict[str, list[int]]:
    """The ranks of each node by node name: the host name, with the node's number if several nodes share a host name."""
    by_place: dict[tuple[int, str], list[int]] = {}
    for info in sorted(infos, key=lambda info: info.rank):
        by_place.setdefault((info.node, info.host), []).append(info.rank)
    namesakes = Counter(host for _, host in by_place)
    nodes = {}
    for (node, host), ranks in by_place.items():
        nodes[f"{host} (node {node})" if namesakes[host] > 1 else host] = ranks
    return nodes


def listed(names: Sequence[str]) -> str:
    """Format a list as `a, b and c`; only the first eight if there are more."""
    if len(names) > 8:
        return f"{', '.join(names[:8])} and {len(names) - 8} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def numbered(ranks: Sequence[int]) -> str:
    """Format ranks as `rank 3` or `ranks 4-7`."""
    return f"rank{'s' * (len(ranks) > 1)} {span(ranks, ', ')}"


def on_nodes(nodes: Nodes, ranks: Collection[int]) -> str:
    """Format some ranks with their nodes, as `ranks 4-7 on b`."""
    parts = []
    for name, members in nodes.items():
        here = sorted(set(members).intersection(ranks))
        if here:
            parts.append(f"{numbered(here)} on {name}")
    return listed(parts)


def reason(error: Exception) -> str:
    """The first line of an error message, without error numbers and C++ source locations."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.lower()}"
    line = str(error).strip().split("\n")[0]
    return re.sub(r"\[[^\]]*\.cc:\d+\] ", "", line).rstrip(".")


def difference(values: Mapping[str, str]) -> str | None:
    """Describe the nodes with another value than most, as `1 on b, but 2 on the others`; None if all are equal."""
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
