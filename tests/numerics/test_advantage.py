"""phalanx.functional.advantage compared with the standard library's statistics by group, and with numbers by hand."""

import random
import statistics
from typing import Any

import pytest
import torch

from phalanx.functional.advantage import group_advantage, group_std, has_signal, rank_in_group, top_and_bottom


def reference(reward: list[float], group: list[int], global_std: bool, normalize: bool, eps: float) -> list[float]:
    """One sample at a time, in float64 with exact means."""
    out = []
    for r, g in zip(reward, group, strict=True):
        peers = [other for other, h in zip(reward, group, strict=True) if h == g]
        if min(peers) == max(peers):
            out.append(0.0)
            continue
        centred = r - statistics.fmean(peers)
        spread = statistics.pstdev(reward if global_std else peers)
        out.append(centred / (spread + eps) if normalize else centred)
    return out


def advantage(reward: list[float], group: list[int], **options: Any) -> list[float]:
    return group_advantage(torch.tensor(reward), torch.tensor(group), **options).tolist()


def test_by_hand() -> None:
    # group 0: 1, 3: mean 2, population std 1; group 1: 0, 0, 3: mean 1, std sqrt((1 + 1 + 4) / 3) = sqrt 2
    reward, group = [1.0, 3.0, 0.0, 0.0, 3.0], [0, 0, 1, 1, 1]
    assert advantage(reward, group, eps=1.0) == pytest.approx([-0.5, 0.5, -0.41421356, -0.41421356, 0.82842712])
    assert advantage(reward, group) == pytest.approx([-0.9999, 0.9999, -0.7070568, -0.7070568, 1.4141136], rel=1e-6)
    # all five: mean 1.4, squares .16 + 2.56 + 1.96 + 1.96 + 2.56 = 9.2, std sqrt(1.84) = 1.3564660
    expected = [x / 2.3564660 for x in (-1, 1, -1, -1, 2)]
    assert advantage(reward, group, global_std=True, eps=1.0) == pytest.approx(expected)
    assert advantage(reward, group, normalize=False) == [-1, 1, -1, -1, 2]
    assert advantage(reward, group, normalize=False, global_std=True) == [-1, 1, -1, -1, 2]


@pytest.mark.parametrize("global_std", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_random_worlds(global_std: bool, normalize: bool) -> None:
    """Groups of all sizes in any order, some with equal rewards; rewards on scales from 1e-3 to 1e3."""
    for trial in range(40):
        draw = random.Random(trial)
        scale, count = 10 ** draw.uniform(-3, 3), draw.randint(1, 40)
        group = [draw.choice([-3, 0, 7, 2**40, 2**62]) for _ in range(count)]
        reward = [scale * draw.choice([0.25, 0.5, draw.random()]) for _ in range(count)]
        reward = torch.tensor(reward).tolist()  # rounded to float32
        eps = draw.choice([1e-4, 1e-8, 0.1])
        ours = advantage(reward, group, global_std=global_std, normalize=normalize, eps=eps)
        expected = reference(reward, group, global_std, normalize, eps)
        assert ours == pytest.approx(expected, rel=1e-5, abs=1e-7 * (1 if normalize else scale))


def test_group_ids_are_told_apart_beyond_float_precision() -> None:
    big = 2**53
    reward = [0.0, 1.0, 10.0, 30.0, 5.0, 5.0]
    close_ids = [big, big, big + 1, big + 1, 2**62, 2**62 + 1]  # equal as float64 (and float32) in pairs of pairs
    expected = [-0.5, 0.5, -10, 10, 0, 0]
    assert advantage(reward, close_ids, normalize=False) == expected
    assert advantage(reward, [-i for i in close_ids], normalize=False) == expected
    assert has_signal(torch.tensor(reward), torch.tensor(close_ids)).tolist() == [True] * 4 + [False] * 2


def test_the_order_of_samples_does_not_matter() -> None:
    draw = random.Random(0)
    reward, group = [draw.random() for _ in range(24)], [i // 4 for i in range(24)]
    order = draw.sample(range(24), 24)
    straight = advantage(reward, group)
    shuffled = advantage([reward[i] for i in order], [group[i] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-6)


def test_a_group_without_differences_counts_for_nothing() -> None:
    # 0.1 and 0.7 are not exact in floating point: the mean of equal rewards may differ from them
    for value in (0.0, 0.1, 0.7, -1e6, 1e-30):
        for options in ({}, {"global_std": True}, {"normalize": False}, {"eps": 0.0}, {"eps": 0.0, "global_std": True}):
            reward = [value] * 7 + [1.0, 2.0]
            result = advantage(reward, [5] * 7 + [2] * 2, **options)
            assert result[:7] == [0.0] * 7 and result[7] < 0 < result[8]
    assert advantage([3.0, 4.0, 4.0], [0, 1, 2]) == [0.0, 0.0, 0.0]  # groups of one
    assert advantage([3.0, 3.0], [0, 1], global_std=True, eps=0.0) == [0.0, 0.0]  # and no spread at all
    assert advantage([], []) == []


def test_each_group_has_mean_zero_and_almost_unit_spread() -> None:
    reward = torch.rand(60, generator=torch.Generator().manual_seed(0)) * 100 + 1000
    group = torch.arange(60) % 5
    result = group_advantage(reward, group).double()
    for g in range(5):
        mine = result[group == g]
        assert abs(mine.mean().item()) < 1e-6
        assert mine.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_small_differences_on_a_large_mean_survive() -> None:
    # float32 sums of 1000 such rewards would lose these differences: 1 / 1024 is the last bit but two of 10000
    reward = [10000.0, 10000.0 + 2**-10] * 500
    assert advantage(reward, [0] * 1000, eps=0.0) == pytest.approx([-1.0, 1.0] * 500, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_any_numbers_in_and_float32_out(dtype: torch.dtype) -> None:
    reward = torch.tensor([0, 1, 1, 1], dtype=dtype)
    for ids in (torch.int64, torch.int32, torch.uint8):
        result = group_advantage(reward, torch.tensor([0, 0, 1, 1], dtype=ids), eps=0.0)
        assert result.dtype == torch.float32 and result.tolist() == [-1, 1, 0, 0]


def test_informative() -> None:
    reward, group = torch.tensor([1.0, 1.0, 2.0, 1.0, 3.0, 3.0]), torch.tensor([4, 4, 1, 1, 9, 9])
    assert has_signal(reward, group).tolist() == [False, False, True, True, False, False]


def test_group_std_is_in_the_order_of_ids() -> None:
    # group 1: 2, 4, 4, 4, 5, 5, 7, 9 has the population std 2; group 8: 0, 1 has .5; group 3 has one sample
    reward = torch.tensor([0.0, 2, 4, 4, 4, 5, 5, 7, 9, 1, 6])
    group = torch.tensor([8, 1, 1, 1, 1, 1, 1, 1, 1, 8, 3])
    spread = group_std(reward, group)
    assert spread.dtype == torch.float32 and spread.tolist() == [2.0, 0.0, 0.5]


def test_rank_in_group_by_hand() -> None:
    # group 7: samples 0, 2, 4 with 3, 1, 2; group 2: samples 1, 3, 5, 6 with 5, 5, 0, 5, equals in their order
    value, group = torch.tensor([3.0, 5.0, 1.0, 5.0, 2.0, 0.0, 5.0]), torch.tensor([7, 2, 7, 2, 7, 2, 2])
    assert rank_in_group(value, group).tolist() == [2, 1, 0, 2, 1, 0, 3]
    assert rank_in_group(-value, group).tolist() == [0, 0, 2, 1, 1, 3, 2]
    assert rank_in_group(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


def test_top_and_bottom_by_hand() -> None:
    reward, group = torch.tensor([3.0, 5.0, 1.0, 5.0, 2.0, 0.0, 5.0]), torch.tensor([7, 2, 7, 2, 7, 2, 2])
    # the best of group 2 is the first of the equal ones, sample 1; its worst is sample 5
    assert top_and_bottom(reward, group, 1).tolist() == [True, True, True, False, False, True, False]
    # group 7 has 3 samples: all are among the best or worst 2; of group 2 the best are 1, 3 and the worst 5, 1
    assert top_and_bottom(reward, group, 2).tolist() == [True, True, True, True, True, True, False]
    assert top_and_bottom(reward, group, 4).all()


def test_top_and_bottom_of_random_groups() -> None:
    """Against sorting each group separately, with many equal rewards."""
    for trial in range(30):
        draw = random.Random(trial)
        count, k = draw.randint(1, 40), draw.randint(1, 4)
        group = [draw.choice([-3, 0, 2**40, 2**62]) for _ in range(count)]
        reward = [float(draw.randint(0, 5)) for _ in range(count)]
        kept = set()
        for g in set(group):
            mine = [i for i in range(count) if group[i] == g]
            kept |= {*sorted(mine, key=lambda i: (reward[i], i))[:k], *sorted(mine, key=lambda i: (-reward[i], i))[:k]}
        chosen = top_and_bottom(torch.tensor(reward), torch.tensor(group), k)
        assert set(chosen.nonzero().flatten().tolist()) == kept
