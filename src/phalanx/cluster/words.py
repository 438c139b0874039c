"""Ranks, nodes and differences in words.

`nodes` maps a node's name to its ranks, in the order of ranks.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from phalanx.cluster.facts import Place

Nodes = Mapping[str, Sequence[int]]


def name_nodes(places: Iterable[Place]) -> dict[str, list[int]]:
    """The ranks of each node. A node is called by its host; where hosts have one name, by its number as well."""
    found: dict[tuple[int, str], list[int]] = {}
    for place in sorted(places, key=lambda place: place.rank):
        found.setdefault((place.node, place.host), []).append(place.rank)
    count = Counter(host for _, host in found)
    return {f"{host} (node {node})" if count[host] > 1 else host: ranks for (node, host), ranks in found.items()}


def spans(ranks: Sequence[int]) -> str:
    """Sorted numbers in short: 0-7, 9."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`; of many the first eight."""
    if len(names) > 8:
        return f"{', '.join(names[:8])} and {len(names) - 8} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def numbered(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 4-7`."""
    return f"rank{'s' * (len(ranks) > 1)} {spans(ranks)}"


def on_nodes(nodes: Nodes, ranks: Iterable[int]) -> str:
    """Where some ranks are: `ranks 4-7 on b`."""
    wanted = set(ranks)
    found = {name: [rank for rank in members if rank in wanted] for name, members in nodes.items()}
    return listed([f"{numbered(members)} on {name}" for name, members in found.items() if members])


def reason(error: Exception) -> str:
    """The first line of an error, without numbers of the operating system and places in C++ source."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.lower()}"
    return re.sub(r"\[[^\]]*\.cc:\d+\] ", "", str(error).strip().split("\n")[0]).rstrip(".")


def difference(values: Mapping[str, str]) -> str | None:
    """How nodes differ in a value: the odd ones by name. None where all are the same."""
    ranking = Counter(values.values()).most_common()
    if len(ranking) == 1:
        return None
    common, times = ranking[0]
    parts = [f"{value} on {listed([n for n in values if values[n] == value])}" for value, _ in reversed(ranking[1:])]
    rest = "the others" if times > 1 else listed([name for name in values if values[name] == common])
    return f"{listed(parts)}, but {common} on {rest}"
