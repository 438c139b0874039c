"""Sampling engines of language models, a file each."""

import os
from typing import Any

from phalanx.config.engines import BLOCK_ENGINES, TURN_ENGINES, engine_class
from phalanx.config.lm import ENGINES, LMRLConfig, LMRunConfig, LMTurnRunConfig
from phalanx.config.load import ConfigError
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.environments.environments import Environments
from phalanx.models.lm.blocks import BlockDiffusionPolicy
from phalanx.models.lm.policy import LMPolicy
from phalanx.rollout.lm.in_policy import check_stops
from phalanx.rollout.registry import check_class, check_installed, made
from phalanx.types import Rollout


def check_entry(kind: Any, name: str) -> None:
    """Raise ConfigError, as a configuration is loaded, for a class that cannot be an engine."""
    check_class(kind, name, "passes", "phalanx.rollout.lm.in_policy.LMRollout")


def check_engine(cfg: LMRunConfig, *, installed: bool = True) -> None:
    """Raise ConfigError for an engine that the environment does not allow, or one that should be `installed` and is
    not.
    """
    if installed:
        check_installed(cfg.rollout)
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if cfg.rollout.facts.sleeps and cfg.rollout.sleep and "expandable_segments:true" in settings.lower():
        raise ConfigError(
            "rollout.sleep: true does not go with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF; take that out, "
            "or set rollout.sleep=false"
        )


def build_rollout(
    cfg: LMRunConfig,
    policy: LMPolicy,
    world: World,
    decoded: int,
    passes: Passes | None,
    environments: Environments | None = None,
) -> Rollout:
    """The rollout that `rollout.engine` names for the kind of policy; all ranks in step. `decoded` samples are drawn
    together; `passes` are those of the training; `environments`: whom samples talk to. Raises ValueError if an
    engine refuses the model.
    """
    engine, names = cfg.rollout.engine, BLOCK_ENGINES if isinstance(policy, BlockDiffusionPolicy) else ENGINES
    check_stops(policy, cfg.rollout)
    beside: dict[str, Any] = {"passes": passes}
    if environments is not None:
        assert isinstance(cfg, LMRLConfig | LMTurnRunConfig), "only such jobs have environments"
        names, beside = TURN_ENGINES, beside | {"environment": cfg.environment, "environments": environments}
    rollout: Rollout = made(engine_class(engine, names), engine, policy, cfg.rollout, world, decoded, **beside)
    return rollout
