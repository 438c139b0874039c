"""Sampling engines of flow models, one file per engine."""

from typing import Any

from phalanx.config.engines import engine_class
from phalanx.config.flow import ENGINES, FlowRolloutConfig
from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.registry import check_class, made


def check_entry(kind: Any, name: str) -> None:
    """Raise ConfigError, when a configuration is loaded, for a class that cannot be an engine."""
    # teachers and supervised training encode their prompts with `encode` and `collate`
    check_class(kind, name, "window", "phalanx.rollout.flow.in_policy.PolicyRollout", beside=("encode", "collate"))


def build_rollout(
    policy: FlowPolicy, config: FlowRolloutConfig, world: World, micro_batch_size: int, *, window: bool = True
) -> PolicyRollout:
    """Construct the engine that the configuration names. Collective. Raises ValueError if it cannot run here."""
    kind = engine_class(config.engine, ENGINES)
    rollout: PolicyRollout = made(kind, config.engine, policy, config, world, micro_batch_size, window=window)
    return rollout
