"""Reward: 1 for the chosen response of a pair in the data and 0 for the rejected one (rollout.engine=dataset)."""

from typing import Any


def chosen(completions: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
    """The data's preference for each response; 0 for responses that the policy sampled in validation."""
    return [float(meta.get("preferred") is True) for meta in metadata]
