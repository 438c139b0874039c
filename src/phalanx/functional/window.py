"""The denoising steps that are taken, stochastic, and trained (Flow-GRPO-Fast; MixGRPO, arXiv 2507.21802)."""

import random


def sde_window(
    step: int,
    *,
    num_inference_steps: int,
    size: int | None,
    window_range: list[int] | None,
    schedule: str,
    iters: int,
    stride: int | None = None,
    seed: int,
) -> range:
    """The window of stochastic steps in training step `step` (counted from 0), equal for all prompts.

    Args:
        size: number of steps; None: all steps of the range.
        window_range: [a, b], for windows within the steps a .. b - 1; None: all steps but the last.
        schedule: `random` draws the start from a .. b - size by (seed, step); `progressive` moves it by `stride` (None:
            `size`) every `iters` training steps, at most to b - size.

    Raises:
        ValueError: if the range is empty, leaves the schedule, or is shorter than the window.
    """
    reach = window_reach(num_inference_steps, window_range)
    first, end = reach.start, reach.stop
    length = end - first if size is None else size
    if length > end - first:
        raise ValueError(
            f"rollout.sde_window_size: {length} does not fit into the range [{first}, {end}]; should be at most "
            f"{end - first}"
        )
    last_start = end - length
    if schedule == "progressive":
        start = min(first + step // iters * (length if stride is None else stride), last_start)
    else:
        start = random.Random(f"window {seed} {step}").randint(first, last_start)
    return range(start, start + length)


def window_reach(num_inference_steps: int, window_range: list[int] | None) -> range:
    """All steps that a window may contain: a .. b - 1 of `window_range`, or all but the last.

    Raises ValueError if there are none, or if they leave the schedule.
    """
    if window_range is None and num_inference_steps < 2:
        raise ValueError(
            f"rollout.num_inference_steps: {num_inference_steps} leaves no step to train, since the last one is not "
            "trained; should be at least 2"
        )
    first, end = window_range if window_range is not None else (0, num_inference_steps - 1)
    if not 0 <= first < end <= num_inference_steps:
        raise ValueError(
            f"rollout.sde_window_range: [{first}, {end}] should satisfy 0 <= a < b <= {num_inference_steps} "
            "(rollout.num_inference_steps)"
        )
    return range(first, end)


def trained_count(stochastic: int, fraction: float) -> int:
    """The number of trained steps of a window: `fraction` of them, rounded, and at least 1."""
    return min(max(1, round(stochastic * fraction)), stochastic)


def trained_steps(window: range, step: int, *, fraction: float, seed: int) -> list[int]:
    """The steps of the window that training step `step` trains, ascending, drawn by (seed, step); equal for all prompts
    (DanceGRPO, arXiv 2505.07818, draws them per sample).
    """
    count = trained_count(len(window), fraction)
    if count == len(window):
        return list(window)
    return sorted(random.Random(f"trained {seed} {step}").sample(window, count))


def visited_levels(num_inference_steps: int, first: int, compression: float) -> list[int]:
    """Indices of the noise levels that a sample visits, from 0 to num_inference_steps: all up to `first`, then a
    fraction `compression` of the remaining steps, evenly spaced over the schedule.
    """
    left = num_inference_steps - first
    steps = max(1, round(left * compression)) if left else 0
    return [*range(first), *(first + round(k * left / steps) for k in range(steps)), num_inference_steps]
