"""The window of stochastic steps: its edges, and how it moves."""

from collections import Counter
from typing import Any

import pytest

from phalanx.functional.window import sde_window, trained_count, trained_steps, visited_levels
from tests.helpers.checks import refused


def window(step: int = 0, **changes: Any) -> range:
    settings: dict[str, Any] = {"num_inference_steps": 10, "size": 2, "window_range": None}
    settings |= {"schedule": "random", "iters": 1, "seed": 0}
    return sde_window(step, **{**settings, **changes})


@pytest.mark.parametrize("schedule", ["random", "progressive"])
def test_without_a_size_it_is_the_whole_range(schedule: str) -> None:
    for step in range(5):
        assert window(step, size=None, schedule=schedule) == range(9)  # all but the last
        assert window(step, size=None, window_range=[2, 5], schedule=schedule) == range(2, 5)
        assert window(step, size=None, window_range=[0, 10], schedule=schedule) == range(10)
        assert window(step, size=9, schedule=schedule) == range(9)
        assert window(step, size=1, num_inference_steps=2, schedule=schedule) == range(1)


def test_random_reaches_every_start_alike() -> None:
    starts = Counter(window(step, size=2, window_range=[1, 6]).start for step in range(2000))
    assert sorted(starts) == [1, 2, 3, 4]  # 4 holds the steps 4 and 5, the last of the range
    assert min(starts.values()) > 400
    assert {window(step, size=2).start for step in range(200)} == set(range(8))
    assert {len(window(step, size=3)) for step in range(50)} == {3}


def test_random_is_a_function_of_seed_and_step() -> None:
    """The window is equal for all prompts, ranks and resumed runs. The numbers must not change between versions."""
    golden = [window(step).start for step in range(20)]
    assert golden == [4, 6, 4, 0, 2, 5, 5, 7, 2, 4, 5, 5, 1, 0, 6, 1, 6, 7, 0, 4]
    assert [window(step).start for step in reversed(range(20))] == golden[::-1]
    assert [window(step, seed=1).start for step in range(20)] != golden


def test_progressive_visits_the_first_window_and_stays_at_the_last() -> None:
    # steps 0 .. 8 in windows of 2: 0, 2, 4, 6, and then 7, so that step 8 is trained too
    starts = [window(step, schedule="progressive", iters=3).start for step in range(21)]
    assert starts == [0] * 3 + [2] * 3 + [4] * 3 + [6] * 3 + [7] * 9
    starts = [window(step, schedule="progressive", window_range=[1, 5]).start for step in range(4)]
    assert starts == [1, 3, 3, 3]
    assert window(10**9, schedule="progressive") == range(7, 9)
    assert window(5, schedule="progressive", seed=1) == window(5, schedule="progressive", seed=2)


def test_mix_grpo_visits_every_start_in_turn() -> None:
    """Windows of 4 move by 1 every 25 training steps, over the 24 of 25 steps that can be trained."""
    mix: dict[str, Any] = {"num_inference_steps": 25, "size": 4, "schedule": "progressive", "iters": 25, "stride": 1}
    starts = [window(step, **mix).start for step in range(600)]
    assert starts == [k for k in range(21) for _ in range(25)] + [20] * 75
    assert [list(window(step, **mix)) for step in (0, 24, 25, 299)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 2, 3, 4],
        [11, 12, 13, 14],
    ]
    assert [list(window(step, **mix)) for step in (500, 10**6)] == [[20, 21, 22, 23]] * 2
    starts = [window(step, schedule="progressive", size=4, stride=3).start for step in range(4)]
    assert starts == [0, 3, 5, 5]  # steps 0 .. 8


def test_a_stride_moves_no_random_window() -> None:
    assert [window(step, stride=1) for step in range(20)] == [window(step) for step in range(20)]


@pytest.mark.parametrize(
    ("stochastic", "fraction", "count"),
    [(15, 0.6, 9), (9, 0.6, 5), (100, 0.29, 29), (10, 0.7, 7), (3, 0.01, 1), (1, 0.5, 1), (7, 1.0, 7), (0, 0.6, 0)],
)
def test_the_number_of_trained_steps(stochastic: int, fraction: float, count: int) -> None:
    assert trained_count(stochastic, fraction) == count
    assert len(trained_steps(range(2, 2 + stochastic), 0, fraction=fraction, seed=0)) == count


def test_trained_steps_are_drawn_anew_for_each_training_step() -> None:
    drawn = [trained_steps(range(1, 6), step, fraction=0.6, seed=0) for step in range(2000)]
    assert all(chosen == sorted(set(chosen)) and set(chosen) <= set(range(1, 6)) for chosen in drawn)
    assert len({tuple(chosen) for chosen in drawn}) == 10  # all 3 of 5
    frequency = Counter(step for chosen in drawn for step in chosen)
    assert all(1100 < frequency[step] < 1300 for step in range(1, 6))  # 3 in 5 of 2000
    assert [trained_steps(range(1, 6), step, fraction=0.6, seed=0) for step in reversed(range(2000))] == drawn[::-1]
    assert [trained_steps(range(1, 6), step, fraction=0.6, seed=1) for step in range(20)] != drawn[:20]
    assert trained_steps(range(1, 6), 3, fraction=1.0, seed=0) == [1, 2, 3, 4, 5]


def test_levels_behind_the_window_are_spread_over_the_schedule() -> None:
    for first in range(11):
        assert visited_levels(10, first, 1.0) == list(range(11))
    assert visited_levels(10, 4, 0.5) == [0, 1, 2, 3, 4, 6, 8, 10]
    assert visited_levels(10, 4, 0.34) == [0, 1, 2, 3, 4, 7, 10]
    assert visited_levels(10, 4, 0.01) == [0, 1, 2, 3, 4, 10]
    assert visited_levels(10, 9, 0.4) == list(range(11))
    # MixGRPO-Flash: 4 of 25 steps in the window, and 8 of the 21 behind it
    assert visited_levels(25, 4, 0.4) == [0, 1, 2, 3, 4, 7, 9, 12, 14, 17, 20, 22, 25]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            (
                {"window_range": [a, b]},
                f"rollout.sde_window_range: [{a}, {b}] should satisfy 0 <= a < b <= 10 (rollout.num_inference_steps)",
            )
            for a, b in ((3, 3), (5, 2), (-1, 4), (0, 11))
        ),
        (
            {"window_range": [2, 5], "size": 4},
            "rollout.sde_window_size: 4 does not fit into the range [2, 5]; should be at most 3",
        ),
        ({"size": 10}, "rollout.sde_window_size: 10 does not fit into the range [0, 9]; should be at most 9"),
        (
            {"num_inference_steps": 1, "size": None},
            "rollout.num_inference_steps: 1 leaves no step to train, since the last one is not trained; "
            "should be at least 2",
        ),
    ],
)
def test_windows_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    for schedule in ("random", "progressive"):
        with refused(message):
            window(schedule=schedule, **changes)
