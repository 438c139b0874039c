"""Sampling engines of language models, one file per engine."""

from typing import Any

from phalanx.config.engines import BLOCK_ENGINES, KEY, engine_class, is_session
from phalanx.config.environment import EnvironmentConfig
from phalanx.config.lm import ENGINES, LMRunConfig
from phalanx.config.messages import ConfigError
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.environments.environments import Environments
from phalanx.models.lm.blocks import BlockDiffusionPolicy
from phalanx.models.lm.lm_policy import LMPolicy
from phalanx.models.lm.model import other_layers
from phalanx.rollout.lm.conversations import Talks
from phalanx.rollout.lm.in_policy import LMRollout, check_stops
from phalanx.rollout.lm.together import decoded_together
from phalanx.rollout.registry import check_call, check_class, made
from phalanx.types import Rollout


def check_entry(kind: Any, name: str) -> None:
    """Raise ConfigError, when a configuration is loaded, for a class that cannot be an engine."""
    if isinstance(kind, type) and is_session(kind):
        check_call(kind, name)
    else:
        check_class(kind, name, "passes", "phalanx.rollout.lm.in_policy.LMRollout")
        if issubclass(kind, LMRollout) and "decode" in dir(kind):
            raise ConfigError(
                f"{KEY}: {name!r}: nothing calls its `decode`; override `session`, which draws tokens, or "
                "`drawn_sample`, which makes a sample of them"
            )


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
    talks = None
    if environments is not None:
        environment: EnvironmentConfig = vars(cfg)["environment"]
        other = other_layers(policy.trained.module.lm)
        if other and cfg.rollout.facts.weights != "copy":
            raise ValueError(
                f"environment.path: {policy.config.path!r} has layers other than full causal attention ({other[0]}); "
                "conversations cannot be decoded with it"
            )
        talks = Talks(policy, environment, environments)
    decoded = decoded_together(cfg, policy, world, decoded)
    kind = engine_class(engine, names)
    if is_session(kind):
        rollout: Any = LMRollout(policy, cfg.rollout, world, decoded, passes)
        rollout.facts, rollout.session = cfg.rollout.facts, kind(policy, cfg.rollout, world, decoded)
    else:
        rollout = made(kind, engine, policy, cfg.rollout, world, decoded, passes=passes)
    if talks is not None:
        if not isinstance(rollout, LMRollout):
            raise ConfigError(
                f"{cfg.rollout:engine}: {engine!r} samples only single turns; derive it from "
                "phalanx.rollout.lm.in_policy.LMRollout, or leave the environment out"
            )
        rollout.talks = talks
    result: Rollout = rollout
    return result
