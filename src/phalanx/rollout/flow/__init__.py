"""The sampling engines of flow models, one file per engine."""

from typing import Any

from phalanx.config.engines import engine_class
from phalanx.config.flow import ENGINES, FlowRolloutConfig
from phalanx.distributed.mesh import World
from phalanx.models.flow.policy import FlowPolicy
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.registry import check_class, check_installed, made


def check_entry(kind: Any, name: str) -> None:
    """Raise ConfigError, as a configuration is loaded, for a class that cannot be an engine."""
    # teachers and supervised training have it encode their prompts
    check_class(kind, name, "window", "phalanx.rollout.flow.in_policy.PolicyRollout", beside=("encode", "collate"))


def build_rollout(
    policy: FlowPolicy, config: FlowRolloutConfig, world: World, micro_batch_size: int, *, window: bool = True
) -> PolicyRollout:
    """The engine that the configuration names, all ranks in step; ValueError if it cannot run here."""
    check_installed(config)
    kind = engine_class(config.engine, ENGINES)
    rollout: PolicyRollout = made(kind, config.engine, policy, config, world, micro_batch_size, window=window)
    return rollout
