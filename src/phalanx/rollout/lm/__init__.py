"""Sampling engines of language models, one file per engine."""

from typing import Any

from phalanx.config.engines import BLOCK_ENGINES, TURN_ENGINES, engine_class
from phalanx.config.lm import ENGINES, LMRLConfig, LMRunConfig, LMTurnRunConfig
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.environments.environments import Environments
from phalanx.models.lm.blocks import BlockDiffusionPolicy
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.rollout.lm.in_policy import check_stops
from phalanx.rollout.lm.together import decoded_together
from phalanx.rollout.registry import check_class, made
from phalanx.types import Rollout


def check_entry(kind: Any, name: str) -> None:
    """Raise ConfigError, when a configuration is loaded, for a class that cannot be an engine."""
    check_class(kind, name, "passes", "phalanx.rollout.lm.in_policy.LMRollout")


def build_rollout(
    cfg: LMRunConfig,
    policy: LMPolicy,
    world: World,
    decoded: int,
    passes: Passes | None,
    environments: Environments | None = None,
) -> Rollout:
    """Construct the engine that `rollout.engine` names for the kind of policy. Collective. Raises ValueError if the
    engine rejects the model. decoded: number of samples to draw together, fewer where a GPU has no room for them.
    passes: see LMRollout. environments: for multi-turn samples.
    """
    engine, names = cfg.rollout.engine, BLOCK_ENGINES if isinstance(policy, BlockDiffusionPolicy) else ENGINES
    check_stops(policy, cfg.rollout)
    beside: dict[str, Any] = {"passes": passes}
    decoded = decoded_together(cfg, policy, world, decoded, talks=environments is not None)
    if environments is not None:
        assert isinstance(cfg, LMRLConfig | LMTurnRunConfig), "only these jobs have environments"
        names, beside = TURN_ENGINES, beside | {"environment": cfg.environment, "environments": environments}
    rollout: Rollout = made(engine_class(engine, names), engine, policy, cfg.rollout, world, decoded, **beside)
    return rollout
