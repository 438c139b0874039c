"""Reward: the score that each sample's environment gives."""

from typing import Any

from phalanx.rewards.base import OfEnvironment


class Environment(OfEnvironment):
    """The result of the environment's `get_reward`, or the sum of the rewards of its steps.

    If the result is a dict, its value under `key` or, without `key`, the sum of all values. Samples that ended by a
    failure of the environment get 0; training excludes them.
    """

    def __init__(self, key: str | None = None) -> None:
        self._key = key

    def __call__(self, completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        return [self._environment_score(meta) for meta in metadata]

    def _environment_score(self, meta: dict[str, Any]) -> float:
        reward = meta["environment_reward"]
        if reward is None:
            if meta["ended"] in ("timeout", "error"):
                return 0.0
            raise ValueError("the environment gives no reward; expected a method get_reward, or step")
        if not isinstance(reward, dict):
            if self._key is not None:
                raise ValueError(f"the environment's reward is a number, without a key {self._key!r}")
            return float(reward)
        if self._key is None:
            return float(sum(reward.values()))
        if self._key not in reward:
            raise ValueError(f"the environment's reward has no key {self._key!r}; it has {', '.join(reward) or 'none'}")
        return float(reward[self._key])
