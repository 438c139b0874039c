"""Which samples of different lengths go through the model together, so that no pass exceeds a number of tokens.

A pass over padded samples has rows x longest tokens, one over packed samples the sum of their lengths.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heapreplace

import torch
from torch import Tensor


def split(tokens: Tensor, parts: int, *, packed: bool, adjacent: bool = False) -> list[list[int]]:
    """Exactly `parts` parts, of costs as equal as a quick search gets them; the costliest come first.

    Args:
        tokens: [U, s] lengths of the s samples of each of U units, which stay together.
        parts: at most U.
        packed: whether the samples of a part stand in one row.
        adjacent: whether units that follow one another go together, as the samples of a prompt that they share; only of
            packed ones.

    Returns:
        Rows of `tokens`, in ascending order within each part; none is empty.
    """
    if adjacent and packed:
        result = _adjacent(tokens, parts)
    else:
        result = _packed(tokens, parts) if packed else _padded(tokens, parts)
    result.sort(key=lambda rows: (-cost(tokens, rows, packed=packed), rows))
    return result


def in_order(values: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """The results [b, ...] of passes over parts, rows of samples [b] each, as those of all samples [B, ...]."""
    back = torch.cat(list(parts)).argsort()
    return torch.cat(list(values))[back.to(values[0].device)]


def cost(tokens: Tensor, rows: list[int], *, packed: bool) -> int:
    """Tokens of a pass over the units `rows` of tokens [U, s]."""
    part = tokens[rows]
    return int(part.sum()) if packed else int(part.max()) * part.numel()


def needed(tokens: Tensor, budget: int, *, packed: bool, adjacent: bool = False, least: int = 1) -> int:
    """The smallest number of parts, from `least` on, with which `split` of tokens [U, s] has at most `budget` tokens in
    each; U where none does.
    """
    total = int(tokens.sum())
    parts = max(least, -(-total // budget))  # packed or not, no part can have more
    while parts < len(tokens) and _largest(tokens, parts, packed=packed, adjacent=adjacent) > budget:
        parts += 1
    return min(parts, len(tokens))


def evenly_dealt(costs: Sequence[float], room: Sequence[int]) -> list[int]:
    """The rank of each sample or unit: the costliest first, each to the rank with the least so far that has room.

    Args:
        costs: of each unit; of equal ones the first comes first.
        room: the most units of each rank, in sum at least as many as there are.
    """
    left, result = list(room), [0] * len(costs)
    heap = [(0.0, rank) for rank in range(len(left)) if left[rank]]
    for unit in sorted(range(len(costs)), key=lambda unit: (-costs[unit], unit)):
        total, rank = heap[0]
        result[unit], left[rank] = rank, left[rank] - 1
        if left[rank]:
            heapreplace(heap, (total + costs[unit], rank))
        else:
            heappop(heap)
    return result


def _largest(tokens: Tensor, parts: int, *, packed: bool, adjacent: bool) -> int:
    cut = split(tokens, parts, packed=packed, adjacent=adjacent)
    return max(cost(tokens, rows, packed=packed) for rows in cut)


def _packed(tokens: Tensor, parts: int) -> list[list[int]]:
    """The longest first, each to the part with the fewest tokens."""
    sizes = tokens.sum(1).tolist()
    heap: list[tuple[int, int, list[int]]] = [(0, i, []) for i in range(parts)]
    heapify(heap)
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        size, i, rows = heap[0]
        heapreplace(heap, (size + sizes[row], i, [*rows, row]))
    return [sorted(rows) for _, _, rows in heap]


def _padded(tokens: Tensor, parts: int) -> list[list[int]]:
    """Neighbors in the order of length: of the smallest cost with which `parts` are enough."""
    longest, width = tokens.max(1).values.tolist(), tokens.shape[1]
    order = sorted(range(len(longest)), key=lambda row: (-longest[row], row))
    lengths = [longest[row] * width for row in order]
    return _runs(order, partial(_cut, lengths), lengths[0], lengths[0] * len(lengths), parts)


def _adjacent(tokens: Tensor, parts: int) -> list[list[int]]:
    """Rows that follow one another: of the smallest sum with which `parts` are enough."""
    sums = tokens.sum(1).tolist()
    return _runs(list(range(len(sums))), partial(_filled, sums), max(sums), sum(sums), parts)


def _runs(order: list[int], cut: Callable[[int], list[int]], low: int, high: int, parts: int) -> list[list[int]]:
    """The rows of `order` in `parts` runs, of the smallest cost from `low` to `high` with which `cut(cost)`, the
    lengths of the runs that it allows, has at most `parts`.
    """
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    sizes = cut(low)
    while len(sizes) < parts:
        largest = sizes.index(max(sizes))
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [sizes[largest] - half, half]
    result, at = [], 0
    for size in sizes:
        result.append(sorted(order[at : at + size]))
        at += size
    return result


def _cut(lengths: list[int], most: int) -> list[int]:
    """How many of descending lengths go together, part by part, where rows x longest is at most `most`."""
    sizes, at = [], 0
    while at < len(lengths):
        size = min(max(most // lengths[at], 1), len(lengths) - at)
        sizes.append(size)
        at += size
    return sizes


def _filled(sums: list[int], most: int) -> list[int]:
    """How many rows go together, part by part, where the sum of their tokens is at most `most`."""
    sizes, total = [0], 0
    for tokens in sums:
        if total + tokens > most:
            sizes.append(0)
            total = 0
        sizes[-1] += 1
        total += tokens
    return sizes
