"""Batch sizes of a step if actor, rollout and inference have separate ranks."""

from dataclasses import replace

from phalanx.config.messages import ConfigError, check_divides
from phalanx.config.run import RLConfig
from phalanx.distributed.mesh import ACTOR, World
from phalanx.run.batch_plan import keys_of
from phalanx.run.link import link_of
from phalanx.run.roles import Roles
from phalanx.training.minibatches import BatchPlan


def of_role(plan: BatchPlan, cfg: RLConfig, roles: Roles, role: str) -> BatchPlan:
    """The batch sizes of one part of a step on a role's ranks, from the actor's; ConfigError if they do not divide."""
    if roles.collocated:
        return plan
    parts = cfg.rollout.parts if cfg.rollout.schedule == "pipelined" else 1
    prompts, ranks = plan.samples // cfg.rollout.n, len(roles.ranks[role])
    if role == ACTOR:
        ranks = cfg.parallel.data_ranks(ranks)
    check_divides("rollout.parts", parts, prompts, "the {} prompts of a step")
    samples = plan.samples // parts
    words = f"{prompts // parts} prompts x {keys_of(cfg)['n']} {cfg.rollout.n} = {samples} samples"
    if samples % ranks:
        raise ConfigError(f"placement.{role}: {ranks} ranks do not divide {words}")
    each = samples // ranks
    if role == ACTOR and parts > 1 and each % plan.micro:
        raise ConfigError(
            f"{keys_of(cfg)['micro']}: {plan.micro} does not divide the {each} samples of a part on a rank ({words} / "
            f"{ranks} ranks of the actor)"
        )
    return replace(plan, samples=samples, per_rank=each, units=each, parts=parts)


def part_of(plan: BatchPlan, cfg: RLConfig, world: World) -> BatchPlan:
    """The batch sizes of one part of a step on the ranks of this rank's role."""
    return plan if world.link is None else of_role(plan, cfg, link_of(world).roles, world.role)
