"""A step's arithmetic where actor, rollout and inference have ranks of their own, and what they do not allow."""

from collections.abc import Callable
from dataclasses import replace

from phalanx.config import ConfigError
from phalanx.config.run import RLConfig
from phalanx.distributed.launch import Launch
from phalanx.distributed.mesh import World
from phalanx.distributed.placement import near_divisors, place
from phalanx.distributed.roles import ACTOR, INFERENCE, ROLLOUT, Roles
from phalanx.training.batch_plan import KEYS
from phalanx.training.minibatches import BatchPlan
from phalanx.types import Algorithm


def of_role(plan: BatchPlan, cfg: RLConfig, roles: Roles, role: str) -> BatchPlan:
    """The arithmetic of a part of a step on the ranks of a role, from that of the actor's; ConfigError where it is
    uneven.
    """
    if roles.collocated:
        return plan
    parts = cfg.rollout.parts if cfg.rollout.schedule == "pipelined" else 1
    prompts, ranks = plan.samples // cfg.rollout.n, len(roles.ranks[role])
    if prompts % parts:
        near = near_divisors(prompts, parts)
        raise ConfigError(f"rollout.parts: {parts} does not divide the {prompts} prompts of a step; nearest: {near}")
    samples = plan.samples // parts
    words = f"{prompts // parts} prompts x {KEYS['n']} {cfg.rollout.n} = {samples} samples"
    if samples % ranks:
        raise ConfigError(f"placement.{role}: {ranks} ranks do not divide {words}")
    each = samples // ranks
    if role == ACTOR and parts > 1 and each % plan.micro:
        raise ConfigError(
            f"{KEYS['micro']}: {plan.micro} does not divide the {each} samples of a part on a rank ({words} / {ranks} "
            "ranks of the actor)"
        )
    return replace(plan, samples=samples, per_rank=each, units=each, parts=parts)


def part_of(plan: BatchPlan, cfg: RLConfig, world: World) -> BatchPlan:
    """The arithmetic of a part of a step on the ranks of this rank's role."""
    return plan if world.link is None else of_role(plan, cfg, world.link.roles, world.role)


def checked(
    cfg: RLConfig, algorithm: Algorithm, plan: Callable[[int], BatchPlan], roles: Roles, launch: Launch
) -> BatchPlan:
    """The actor's arithmetic on the ranks that it has; refuses what the roles cannot run (ConfigError)."""
    found = plan(cfg.parallel.data_ranks(len(roles.ranks[ACTOR])))
    check_schedule(cfg, algorithm, found, roles)
    if cfg.reward.model.path is not None:
        samplers = roles.launch(ROLLOUT, launch)
        place(cfg.reward.model, samplers.world_size, samplers.local_world_size)
    return found


def check_schedule(cfg: RLConfig, algorithm: Algorithm, plan: BatchPlan, roles: Roles) -> None:
    """Refuse a schedule that the placement or the algorithm does not allow; raises ConfigError."""
    schedule = cfg.rollout.schedule
    key = f"rollout.schedule: {schedule}"
    if roles.collocated:
        if schedule != "synchronous":
            raise ConfigError(f"{key} needs ranks that only sample; see placement, such as {{rollout: 0, actor: 1}}")
        return
    for role in roles.ranks:
        of_role(plan, cfg, roles, role)
    if INFERENCE in roles.ranks and (cfg.rollout.facts.exact or algorithm.levels is not None):
        raise ConfigError("placement.inference: there are no log-probs to take again; give its ranks to the rollout")
    if cfg.rollout.max_staleness == 0 and schedule == "one_step_off":
        raise ConfigError(f"{key} trains on samples that are one step old; set rollout.max_staleness to 1")
    if schedule != "pipelined":
        return
    if plan.epochs > 1 or cfg.algorithm.needs_critic:
        raise ConfigError(f"{key} trains each sample once, as it comes; set actor.ppo_epochs to 1, without a critic")
    if cfg.rollout.parts % plan.updates:
        raise ConfigError(
            f"rollout.parts: {cfg.rollout.parts} parts do not divide over the {plan.updates} updates of a step; "
            f"expected a multiple of {plan.updates}"
        )
    whole = vars(cfg.algorithm).get("global_std") or algorithm.per_action or cfg.reward.normalize == "gdpo"
    if whole or algorithm.levels is not None or algorithm.samples_per_unit > 1:
        raise ConfigError(
            f"{key}: {cfg.algorithm.name} looks at all samples of a step before it trains the first one (as with "
            "global_std); expected such as grpo with algorithm.global_std=false"
        )
    if cfg.actor.loss_agg_mode == "seq-mean-token-sum-norm" and cfg.actor.loss_scale_factor is None:
        raise ConfigError(f"{key} does not know the longest sample before the last one; set actor.loss_scale_factor")
