"""Group samples of different lengths into forward passes, so that no pass exceeds a number of tokens.

A pass over padded samples has rows x longest tokens; a pass over packed samples has the sum of their lengths.
"""

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

import torch
from torch import Tensor


def split(tokens: Tensor, parts: int, *, packed: bool, adjacent: bool = False) -> list[list[int]]:
    """Split units into exactly `parts` parts with roughly equal costs (a fast heuristic), the most expensive first.

    Args:
        tokens: [U, s], lengths of the s samples of each of U units, which stay together.
        parts: at most U.
        packed: whether the samples of a part are packed into one row.
        adjacent: whether parts consist of consecutive units, such as the samples of a prompt; only used with `packed`.

    Returns:
        The rows of `tokens` in each part, in ascending order; no part is empty.
    """
    if packed and adjacent:
        result = _split_runs(list(range(len(tokens))), tokens.sum(1).tolist(), parts, packed=True)
    elif packed:
        result = _split_packed(tokens, parts)
    else:
        costs = (tokens.max(1).values * tokens.shape[1]).tolist()
        order = sorted(range(len(costs)), key=lambda row: (-costs[row], row))
        result = _split_runs(order, [costs[row] for row in order], parts, packed=False)
    result.sort(key=lambda rows: (-cost(tokens, rows, packed=packed), rows))
    return result


def in_order(values: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the results [b, ...] of passes over `parts` (rows [b]) in the order of the samples [B, ...]."""
    back = torch.cat(list(parts)).argsort()
    return torch.cat(list(values))[back.to(values[0].device)]


def cost(tokens: Tensor, rows: list[int], *, packed: bool) -> int:
    """Number of tokens in a pass over the units `rows` of tokens [U, s]."""
    part = tokens[rows]
    return int(part.sum()) if packed else int(part.max()) * part.numel()


def needed(tokens: Tensor, budget: int, *, packed: bool, adjacent: bool = False, least: int = 1) -> int:
    """The smallest number of parts, at least `least`, with which `split` of tokens [U, s] gives at most `budget` tokens
    per part; U if no number does.
    """
    total = int(tokens.sum())
    parts = max(least, -(-total // budget))  # a lower bound, packed or not
    while parts < len(tokens):
        largest = split(tokens, parts, packed=packed, adjacent=adjacent)[0]
        if cost(tokens, largest, packed=packed) <= budget:
            break
        parts += 1
    return min(parts, len(tokens))


def evenly_dealt(costs: Sequence[float], room: Sequence[int]) -> list[int]:
    """Assign units to ranks: the most expensive first, each to the rank with the lowest cost so far that has room.

    Args:
        costs: the cost of each unit; equal ones keep their order.
        room: the maximum number of units per rank; the sum must be at least the number of units.

    Returns:
        The rank of each unit.
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


def _split_packed(tokens: Tensor, parts: int) -> list[list[int]]:
    """Assign rows to parts: the longest first, each to the part with the fewest tokens."""
    sizes = tokens.sum(1).tolist()
    heap: list[tuple[int, int, list[int]]] = [(0, i, []) for i in range(parts)]
    heapify(heap)
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        size, i, rows = heap[0]
        heapreplace(heap, (size + sizes[row], i, [*rows, row]))
    return [sorted(rows) for _, _, rows in heap]


def _split_runs(order: list[int], costs: list[int], parts: int, *, packed: bool) -> list[list[int]]:
    """Split the rows `order` into `parts` runs of at most the smallest cost for which so many runs are enough, found by
    a binary search. costs: of each row; that of a run is their sum or, unless `packed`, rows x that of the first row.
    """

    def cut(most: int) -> list[int]:
        """The sizes of runs of at most this cost."""
        sizes, total, each = [0], 0, 0
        for cost in costs:
            each = cost if packed or total == 0 else each
            if total + each > most:
                sizes.append(0)
                total, each = 0, cost
            sizes[-1] += 1
            total += each
        return sizes

    low, high = max(costs), max(costs) * len(costs)
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
