"""Sampling engines of language models, a file each."""

import os
from typing import Any

from phalanx.config.blocks import BLOCK_ENGINES
from phalanx.config.engines import engine_class
from phalanx.config.lm import ENGINES, LMRLConfig, LMRunConfig
from phalanx.config.load import ConfigError
from phalanx.distributed.launch import Launch
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.distributed.placement import near_divisors
from phalanx.distributed.roles import ROLLOUT, roles_of
from phalanx.models.lm.blocks import BlockDiffusionPolicy
from phalanx.models.lm.policy import LMPolicy
from phalanx.rollout.registry import check_class, check_exact, check_installed, check_redraws, made
from phalanx.types import Rollout


def check_entry(found: Any, name: str) -> None:
    """Raise ConfigError, as a configuration is loaded, for a class that cannot be an engine."""
    check_class(found, name, "passes", "phalanx.rollout.lm.in_policy.LMRollout")


def check_engine(cfg: LMRunConfig, launch: Launch | None = None, *, installed: bool = True) -> None:
    """Raise ConfigError for what the engine cannot do on the ranks of a launch (None: the present one), or
    one that should be `installed` and is not.
    """
    r, facts, launch = cfg.rollout, cfg.rollout.facts, launch or Launch.from_env()
    if isinstance(cfg, LMRLConfig):
        launch = roles_of(cfg.placement, launch).launch(ROLLOUT, launch)
    node = launch.local_world_size
    check_exact(r)
    check_redraws(r)
    if facts.weights == "policy" and not cfg.parallel.rollout_unsharded:
        raise ConfigError(
            "parallel.rollout_unsharded: false would gather weights for each token, and ranks decode different "
            "numbers of tokens; set it to true"
        )
    if installed:
        check_installed(r)
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    if facts.sleeps and r.sleep and "expandable_segments:true" in settings.lower():
        raise ConfigError(
            "rollout.sleep: true does not go with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF; take that out, "
            "or set rollout.sleep=false"
        )
    if facts.tensor_parallel and node % r.tensor_parallel_size:
        raise ConfigError(
            f"rollout.tensor_parallel_size: {r.tensor_parallel_size} does not divide the {node} ranks of a node; "
            f"nearest that does: {near_divisors(node, r.tensor_parallel_size)}"
        )


def build_rollout(cfg: LMRunConfig, policy: LMPolicy, world: World, decoded: int, passes: Passes | None) -> Rollout:
    """The rollout that `rollout.engine` names for the kind of policy; all ranks in step. `decoded` samples are drawn
    together; `passes` are those of the training. Raises ValueError where an engine refuses the model.
    """
    engine, names = cfg.rollout.engine, BLOCK_ENGINES if isinstance(policy, BlockDiffusionPolicy) else ENGINES
    rollout: Rollout = made(engine_class(engine, names), engine, policy, cfg.rollout, world, decoded, passes=passes)
    return rollout
