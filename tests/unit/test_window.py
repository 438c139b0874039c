"""The window of stochastic steps: its edges, and how it moves."""

from collections import Counter
from typing import Any

import pytest

from phalanx.functional.window import sde_window


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
    """The same for all prompts, ranks and resumed runs: nothing else enters. The numbers must not change."""
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"window_range": [3, 3]},
            "rollout.sde_window_range: [3, 3] should satisfy 0 <= a < b <= 10 (rollout.num_inference_steps)",
        ),
        (
            {"window_range": [5, 2]},
            "rollout.sde_window_range: [5, 2] should satisfy 0 <= a < b <= 10 (rollout.num_inference_steps)",
        ),
        (
            {"window_range": [-1, 4]},
            "rollout.sde_window_range: [-1, 4] should satisfy 0 <= a < b <= 10 (rollout.num_inference_steps)",
        ),
        (
            {"window_range": [0, 11]},
            "rollout.sde_window_range: [0, 11] should satisfy 0 <= a < b <= 10 (rollout.num_inference_steps)",
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
        with pytest.raises(ValueError) as error:
            window(schedule=schedule, **changes)
        assert str(error.value) == message
