"""Warnings about signs in a run's metrics that it learns nothing; each is reported once."""

from typing import Any

from phalanx.config.joint import PAINTER
from phalanx.telemetry.timers import is_training_row

PATIENCE = 5  # consecutive steps without a learning signal before a warning, or all steps of a shorter job
SAME_STEPS = 10  # consecutive steps with exactly the same mean reward before a warning


class Advisor:
    """Checks the rows of a run of `total_steps` training steps, one after the other.

    `samples_per_prompt` is rollout.n; with 1, rewards cannot be compared within a prompt; 0 if samples are of the data,
    whose rewards may all be equal. `max_response_length` is mentioned in the warning about truncated responses.
    `policy`: which policy of a joint run to check.
    """

    def __init__(
        self, total_steps: int, samples_per_prompt: int, max_response_length: int | None, policy: str | None = None
    ) -> None:
        self._policy, self._total = policy, total_steps
        self._samples_per_prompt, self._limit = samples_per_prompt, max_response_length
        self._streaks: dict[str, int] = {}
        self._reported: set[str] = set()
        self._last_reward: tuple[Any, Any] | None = None

    def warnings(self, step: int, row: dict[str, Any]) -> list[str]:
        """The new warnings about this row."""
        if self._policy is None:
            return self._row_warnings(step, row)
        prefix = f"{self._policy}/"
        metrics = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
        if self._policy == PAINTER:  # the rewards of the run are those of the painter's images
            metrics |= {key: value for key, value in row.items() if key.startswith("reward/")}
        return [f"{self._policy}: {line}" for line in self._row_warnings(step, metrics)]

    def _row_warnings(self, step: int, row: dict[str, Any]) -> list[str]:
        lines = []
        if row.get("response/truncated_ratio") == 1 and self._has_lasted("cut", True, 1):
            limit = "data.max_response_length" + (f"={self._limit}" if self._limit else "")
            lines.append(
                f"all responses of step {step} are cut at {limit}, before their end of sequence: raise it, or reward "
                "shorter responses"
            )
        # for a policy of a joint run, only steps count in which it was trained
        if not is_training_row(row) or (self._policy is not None and not any(key.startswith("actor/") for key in row)):
            return lines
        signal = self._missing_signal(step, row)
        if signal is not None:
            lines.append(signal)
        reward = row.get("reward/mean"), row.get("reward/std")
        is_same = reward == self._last_reward and bool(reward[1]) and self._samples_per_prompt > 0
        self._last_reward = reward
        if self._has_lasted(
            "same", is_same, SAME_STEPS - 1
        ):  # k equal values are k - 1 comparisons with the previous one
            lines.append(
                f"reward/mean is {reward[0]:g} in each of the last {SAME_STEPS} steps, up to step {step}: either the "
                "samples do not depend on the weights, or the reward does not depend on the samples"
            )
        return lines

    def _missing_signal(self, step: int, row: dict[str, Any]) -> str | None:
        """A warning about rewards that do not differ, or about weights that do not change."""
        # PPO's critic learns from a single sample per prompt, and its warm-up updates no policy
        has_critic = any(key.startswith("critic/") for key in row)
        high, low = row.get("reward/max"), row.get("reward/min")
        no_group_differs = row.get("reward/zero_std_ratio") == 1 and self._samples_per_prompt > 1 and not has_critic
        reason = None if has_critic else _why_nothing_was_updated(row)
        patience = min(PATIENCE, self._total)
        no_sample_differs = high is not None and high == low and self._samples_per_prompt > 0
        is_flat = self._has_lasted("flat", no_sample_differs, patience)
        is_even = self._has_lasted("even", no_group_differs, patience)
        is_idle = self._has_lasted("idle", reason is not None, patience)
        if not (is_flat or is_even or is_idle):
            return None
        self._reported |= {"flat", "even", "idle"}  # each implies the next, so report only one
        steps = f"the last {patience} steps, up to step {step}"
        if is_flat:
            return f"the reward is {high:g} for every sample of {steps}: there is nothing to learn from"
        if is_even:
            return f"no prompt's samples differ in reward in {steps}: there is nothing to learn from"
        return f"no weight was updated in {steps}: {reason}"

    def _has_lasted(self, kind: str, holds: bool, patience: int) -> bool:
        """True once, when the condition has held for `patience` consecutive rows."""
        self._streaks[kind] = self._streaks.get(kind, 0) + 1 if holds else 0
        if self._streaks[kind] < patience or kind in self._reported:
            return False
        self._reported.add(kind)
        return True


def _why_nothing_was_updated(row: dict[str, Any]) -> str | None:
    if "actor/updates_skipped" in row and "actor/grad_norm" not in row:
        return "every sample was left out of the update"
    if row.get("actor/grad_norm") == 0:
        return "the gradient is 0"
    if row.get("actor/lr") == 0:
        return "the learning rate is 0"
    return None
