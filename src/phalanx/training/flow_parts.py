"""The parts of every job that trains a flow-matching model."""

from dataclasses import dataclass

from phalanx.config.flow import FlowRunConfig
from phalanx.data.prompts import validation_sets
from phalanx.models.flow.policy import FlowPolicy, build_policy, image_columns
from phalanx.rollout.flow import build_rollout
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.training.parts import Parts, build_rewards, start


@dataclass(frozen=True)
class FlowParts(Parts):
    """Parts whose policy and rollout are of the kind."""

    policy: FlowPolicy
    rollout: PolicyRollout


def build_parts(cfg: FlowRunConfig, micro: int, *, detach_uncond: bool = False, window: bool = True) -> FlowParts:
    """`micro` and `window` are the rollout's. Raises ValueError, with one line, for what the user can fix."""
    world = start(cfg)
    val_sets = validation_sets(cfg.data.val_files, images=image_columns(cfg.model), prompt=cfg.data.prompt_key)
    rewards = build_rewards(cfg, world)
    policy = build_policy(cfg.model, cfg.parallel, cfg.data, world, seed=cfg.trainer.seed, detach_uncond=detach_uncond)
    rollout = build_rollout(policy, cfg.rollout, world, micro, window=window)
    return FlowParts(world, rewards, policy, rollout, val_sets)
