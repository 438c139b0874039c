"""Micro-batches by tokens: no sample is lost, none exceeds the budget, and their number is near the minimum."""

import itertools
import random

import pytest
import torch

from phalanx.functional.token_budget import cost, evenly_dealt, needed, split


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_parts_of_random_lengths(packed: bool) -> None:
    rng = random.Random(0)
    for _ in range(300):
        units, together = rng.randint(1, 40), rng.choice([1, 1, 2])
        tokens = torch.tensor([[rng.randint(1, 100) for _ in range(together)] for _ in range(units)])
        budget = rng.randint(100 * together, 1000)
        number = needed(tokens, budget, packed=packed)
        for parts in {number, min(number + 1, units), units}:
            found = split(tokens, parts, packed=packed)
            assert sorted(row for rows in found for row in rows) == list(range(units))
            assert len(found) == parts and all(rows == sorted(rows) and rows for rows in found)
            costs = [cost(tokens, rows, packed=packed) for rows in found]
            assert costs == sorted(costs, reverse=True)
            assert costs[0] <= budget or parts != number
        if packed:  # the longest first is within a third of the best
            assert number <= -(-int(tokens.sum()) // budget) * 4 / 3 + 1
        assert needed(tokens, budget, packed=packed, least=number) == number


def test_by_hand() -> None:
    lengths = torch.tensor([[7], [2], [5], [4], [2]])
    assert [cost(lengths, rows, packed=True) for rows in split(lengths, 2, packed=True)] == [11, 9]
    # 2 x 7 and 3 x 4, rather than 5 x 7
    assert split(lengths, 2, packed=False) == [[0, 2], [1, 3, 4]]
    assert (needed(lengths, 14, packed=False), needed(lengths, 13, packed=False)) == (2, 3)
    assert (needed(lengths, 11, packed=True), needed(lengths, 10, packed=True)) == (2, 3)
    assert needed(lengths, 20, packed=True, least=4) == 4


def test_neighbors_stay_together() -> None:
    """Each part is a run of rows, and no other split into as many runs has a smaller largest run."""
    lengths = torch.tensor([[3], [3], [3], [4], [4], [4]])
    assert split(lengths, 2, packed=True, adjacent=True) == [[3, 4, 5], [0, 1, 2]]
    assert cost(lengths, split(lengths, 2, packed=True)[0], packed=True) == 11  # else the prompts are mixed
    rng = random.Random(0)
    for _ in range(100):
        units = rng.randint(1, 9)
        tokens = torch.tensor([[rng.randint(1, 100)] for _ in range(units)])
        budget = rng.randint(100, 300)
        number = needed(tokens, budget, packed=True, adjacent=True)
        parts = split(tokens, number, packed=True, adjacent=True)
        assert sorted(parts) == sorted(parts, key=lambda rows: rows[0]) and len(parts) == number
        assert [row for rows in sorted(parts) for row in rows] == list(range(units))
        largest = []
        for ends in itertools.combinations(range(1, units), number - 1):
            runs = itertools.pairwise((0, *ends, units))
            largest.append(max(int(tokens[start:end].sum()) for start, end in runs))
        assert cost(tokens, parts[0], packed=True) == min(largest) <= budget


@pytest.mark.parametrize(("adjacent", "prompts"), [(True, 38), (False, 170)])
def test_prompts_that_passes_compute(adjacent: bool, prompts: int) -> None:
    """The figures of docs/language-models.md: 32 groups of 8, with lengths that are correlated within a group."""
    rng, groups, n = random.Random(0), 32, 8
    lengths = []
    for _ in range(groups):
        middle = 500 * rng.lognormvariate(0, 0.4)
        for _ in range(n):
            lengths.append([1000 + int(middle * rng.lognormvariate(0, 0.4))])
    tokens = torch.tensor(lengths)
    parts = split(tokens, 7, packed=True, adjacent=adjacent)
    computed = sum(len({row // n for row in rows}) for rows in parts)
    assert computed == prompts and (computed <= groups + len(parts) - 1) == adjacent


def test_ranks_get_equal_costs() -> None:
    assert evenly_dealt([1, 9, 5, 5], [2, 2]) == [0, 0, 1, 1]  # 9, then 5 and 5 to the other, which is full then
    assert evenly_dealt([2, 2, 2, 2], [2, 2]) == [0, 1, 0, 1]
    assert evenly_dealt([7, 1, 1], [0, 1, 2]) == [1, 2, 2]
    assert evenly_dealt([], [0, 0]) == []
    rng = random.Random(0)
    for _ in range(100):
        ranks, each = rng.randint(1, 8), rng.randint(2, 20)
        costs = [rng.lognormvariate(0, 0.5) for _ in range(ranks * each)]
        result = evenly_dealt(costs, [each] * ranks)
        assert [result.count(rank) for rank in range(ranks)] == [each] * ranks
        totals = [sum(cost for cost, where in zip(costs, result, strict=True) if where == r) for r in range(ranks)]
        assert max(totals) - min(totals) <= max(costs)
