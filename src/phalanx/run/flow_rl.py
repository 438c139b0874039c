"""Reinforcement learning of a flow-matching model: check the configuration and build the job."""

import logging
from functools import partial

from phalanx import algorithms
from phalanx.config.flow import FlowRLConfig
from phalanx.config.messages import ConfigError
from phalanx.data.overlap import held_out_overlap
from phalanx.data.prompts import load_prompts
from phalanx.data.streams import PromptStream
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import INFERENCE, ROLLOUT
from phalanx.functional.window import sde_window, trained_count
from phalanx.models.flow.registry import family_of, image_columns
from phalanx.rollout.flow.samplers import train_sampler, val_sampler
from phalanx.rollout.registry import check_installed
from phalanx.run import batch_plan
from phalanx.run.disaggregated.role_batches import checked, of_role, part_of
from phalanx.run.disaggregated.workers import LogProbWorker, RolloutWorker
from phalanx.run.flow_components import build_components, check_plan
from phalanx.run.flow_teacher import check_teacher, guided_reference, load_teacher
from phalanx.run.prompt_lengths import fitting
from phalanx.run.rl import Trainer, build_trainer
from phalanx.run.roles import Roles
from phalanx.run.start import routed
from phalanx.run.world import check_world
from phalanx.telemetry.loggers import check_loggers
from phalanx.training.minibatches import BatchPlan
from phalanx.types import Algorithm

log = logging.getLogger(__name__)


def build(cfg: FlowRLConfig) -> Trainer | RolloutWorker | LogProbWorker:
    """Build the job, or this rank's worker in it; all ranks call this together. A ValueError is the user's mistake."""
    # The cheapest checks come first: numbers, then files, then everything that needs process groups and models.
    plan = check(cfg)
    algorithm = algorithms.build(cfg.algorithm)
    columns = (*image_columns(cfg.model), *cfg.rollout.facts.columns)
    data, key = cfg.data, cfg.data.prompt_key
    rows = load_prompts(data.train_files, "data.train_files", columns, key, unusable=data.unusable_rows)
    rows = routed(rows, algorithm.teachers, first=Launch.from_env().rank == 0)
    for teacher in algorithm.teachers:
        check_teacher(teacher, cfg.model)
    detach, window = cfg.actor.detach_uncond, algorithm.levels is None
    components = build_components(
        cfg, plan.rollout_micro, rows, detach_uncond=detach, window=window, last_steps=algorithm.last_steps
    )
    world, policy, rollout = components.world, components.policy, components.rollout
    rows = fitting(components.rows, "data.train_files", policy.model, cfg, first=world.rank == 0)
    prompts = PromptStream(rows, plan.samples // cfg.rollout.n, cfg.data.seed)
    if world.role == INFERENCE:
        return LogProbWorker(cfg, part_of(plan, cfg, world), world, policy)
    if world.role == ROLLOUT:
        return RolloutWorker(cfg, part_of(plan, cfg, world), components, prompts)
    teachers = {}
    for teacher in algorithm.teachers:
        loaded = load_teacher(teacher, cfg, policy, world, plan.rollout_micro)
        teachers[teacher.name] = loaded
        # encode the teacher's prompts together with the policy's, so that both text encoders are on the device only
        # before a rollout and never during training
        if rollout is not None:
            rollout.ahead.encoders.append(loaded.rollout.encode)
    scale = vars(cfg.algorithm).get("reference_guidance")
    if scale is not None:
        teachers["reference"] = guided_reference(scale, cfg, policy, world, plan.rollout_micro)
        if rollout is not None:
            rollout.ahead.encoders.append(teachers["reference"].rollout.encode)
    trainer = build_trainer(cfg, plan, algorithm, components, prompts, teachers)
    if world.lead:
        held_out = [p for some in components.val_sets.values() for p in some]
        held_out_overlap(rows, held_out, policy.model.image_column)
        _warn_of_inexact_log_probs(cfg, plan, algorithm, exact=components.exact)
    return trainer


def _warn_of_inexact_log_probs(cfg: FlowRLConfig, plan: BatchPlan, algorithm: Algorithm, *, exact: bool) -> None:
    if exact and not plan.exact and algorithm.levels is None:
        log.warning(
            "rollout.micro_batch_size_per_gpu %d is not ppo_micro_batch_size_per_gpu x window = %d: log-probs of "
            "rollout and replay may differ in the last bits (see actor/first_ratio_error)",
            plan.rollout_micro,
            plan.micro * plan.actions,
        )


def check(cfg: FlowRLConfig, launch: Launch | None = None) -> BatchPlan:
    """Raise ConfigError for a configuration that the ranks of `launch` (None: the current one) cannot run.

    This needs no process group, so mistakes are reported before ranks wait for one another.
    """
    check_config(cfg)
    check_loggers(cfg.trainer.logger)
    batches = check_world(cfg, partial(check_roles, cfg), launch or Launch.from_env())
    check_installed(cfg.rollout)
    check_plan(cfg)
    family = family_of(cfg.model)
    if cfg.rollout.facts.columns and not family.encodes_images:
        raise ConfigError(
            f"{cfg.rollout:engine:} trains on images of the data, which {family.pipeline_class} "
            f"cannot encode; set {cfg.rollout:engine}=policy"
        )
    train_sampler(cfg.rollout, family)
    val_sampler(cfg.rollout, family)
    return batches


def check_roles(cfg: FlowRLConfig, roles: Roles, launch: Launch) -> BatchPlan:
    """The actor's batch sizes; ConfigError if those of any role do not divide."""
    batches = checked(cfg, partial(plan, cfg), roles, launch)
    part = of_role(batches, cfg, roles, ROLLOUT)
    if part.per_rank % part.rollout_micro:  # the last pass would have another shape than the replay
        raise ConfigError(
            f"{cfg.actor:ppo_micro_batch_size_per_gpu}: the rollout's passes of {part.rollout_micro} samples do not "
            f"divide the {part.per_rank} of each of its {len(roles.ranks[ROLLOUT])} ranks; change that, or placement"
        )
    return batches


def check_config(cfg: FlowRLConfig) -> None:
    """Raise ConfigError for combinations that cannot work with any number of ranks."""
    algorithm = algorithms.build(cfg.algorithm)
    if isinstance(algorithm, algorithms.TokenAlgorithm):
        raise ConfigError(f"algorithm.name: {cfg.algorithm.name} trains language models; expected such as flow_grpo")
    batch_plan.check(cfg, algorithm)
    if algorithm.levels is None:
        stochastic_steps(cfg)


def plan(cfg: FlowRLConfig, world_size: int) -> BatchPlan:
    """The batch sizes of a step on `world_size` ranks; ConfigError with the numbers if they do not divide."""
    algorithm = algorithms.build(cfg.algorithm)
    return batch_plan.plan(cfg, algorithm, world_size, actions=trained_actions(cfg, algorithm))


def trained_actions(cfg: FlowRLConfig, algorithm: Algorithm) -> int:
    """W: the number of denoising steps or noise levels at which each sample is trained."""
    if algorithm.levels is not None:
        return algorithm.levels
    return trained_count(stochastic_steps(cfg), cfg.rollout.timestep_fraction)


def stochastic_steps(cfg: FlowRLConfig) -> int:
    """Number of stochastic steps in the window; ConfigError if the window does not fit the schedule."""
    r = cfg.rollout
    try:
        window = sde_window(
            0,
            num_inference_steps=r.num_inference_steps,
            size=r.sde_window_size,
            window_range=r.sde_window_range,
            schedule=r.window_schedule,
            iters=r.window_iters,
            seed=0,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return len(window)
