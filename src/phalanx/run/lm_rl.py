"""Reinforcement learning of a language model: check the configuration and build the job."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from phalanx import algorithms
from phalanx.algorithms import TokenAlgorithm
from phalanx.config.lm import LMRLConfig, LMRolloutConfig
from phalanx.config.messages import ConfigError
from phalanx.config.section import copy_with
from phalanx.config.trained_model import LMModelConfig
from phalanx.data.overlap import held_out_overlap
from phalanx.data.prompts import load_prompts, validation_sets
from phalanx.data.streams import PromptStream
from phalanx.distributed.context_parallel import KEY
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import INFERENCE, ROLLOUT, World
from phalanx.distributed.passes import Passes
from phalanx.environments.environments import Environments, with_tools
from phalanx.functional.tokens import Truncation
from phalanx.models.lm import vision_families
from phalanx.models.lm.blocks import build_block_policy
from phalanx.models.lm.lm_policy import LMPolicy, build_policy
from phalanx.models.lm.value_model import build_critic
from phalanx.rollout.lm import build_rollout, check_engine
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.rollout.lm.partial import PartialRollout, drawn_at_once
from phalanx.run import batch_plan
from phalanx.run.disaggregated.role_batches import checked, part_of
from phalanx.run.disaggregated.workers import LogProbWorker, RolloutWorker
from phalanx.run.lm_prompt_lengths import fitting_prompts
from phalanx.run.lm_teacher import load_teacher
from phalanx.run.rl import Trainer, build_trainer
from phalanx.run.start import JobComponents, build_rewards, fitting_sets, routed, start_job
from phalanx.run.usable_images import usable_images
from phalanx.run.world import check_world
from phalanx.telemetry.loggers import check_loggers
from phalanx.training.critic_trainer import CriticTrainer
from phalanx.training.minibatches import BatchPlan
from phalanx.types import Algorithm, Prompt

log = logging.getLogger(__name__)


def build(cfg: LMRLConfig) -> Trainer | RolloutWorker | LogProbWorker:
    """Build the job, or this rank's worker in it; all ranks call this together. A ValueError is the user's mistake."""
    plan = check(cfg)
    algorithm = build_algorithm(cfg)
    data, key = cfg.data, cfg.data.prompt_key
    form: dict[str, Any] = {"quoted": False, "image_key": data.image_key, "unusable": data.unusable_rows}
    rows = load_prompts(data.train_files, "data.train_files", prompt=key, **form)
    rows = routed(rows, algorithm.teachers, first=Launch.from_env().rank == 0)
    val_sets = validation_sets(data.val_files, prompt=key, **form)
    held_out = [prompt for prompts in val_sets.values() for prompt in prompts]
    every = [*rows, *held_out]
    place = next((row.place for row in every if row.images), None)
    if place is not None:
        check_images(cfg, f"{place} has images")
        vision_families.check(cfg.model, place)
        check_counts(every, cfg.rollout.limit_images)
    elif data.image_key is not None:
        raise ConfigError(f"data.image_key: no row of the data files has images in a column {data.image_key!r}")
    images = place is not None or vision_families.is_needed(cfg.model)
    if images and place is None:
        check_images(cfg, f"{cfg.model:path}: transformers has no text-only class for {cfg.model.path!r}")
    environments = Environments(cfg.environment) if cfg.environment.used else None
    if environments is not None:
        rows = with_tools(rows, environments)
        val_sets = fitting_sets(val_sets, lambda some, _: with_tools(some, environments))
    world = start_job(cfg)
    usable = partial(usable_images, unusable=data.unusable_rows, world=world)
    rows, val_sets = usable(rows, "data.train_files"), fitting_sets(val_sets, usable)
    rewards = build_rewards(cfg, world, rows, val_sets, outputs="completions")
    if val_sets and rewards is not None and not rewards.validates:
        raise ConfigError(
            "data.val_files: the policy itself computes all terms of the reward, which it does only in training; add "
            "one for validation, such as {name: gsm8k, weight: 0}"
        )
    policy = load_policy(cfg, world, plan, images=images)
    plan = as_loaded(plan, policy)
    if world.role == INFERENCE:
        return LogProbWorker(cfg, part_of(plan, cfg, world), world, policy)
    rows = fitting_prompts(rows, "data.train_files", policy, first=world.lead)
    val_sets = fitting_sets(val_sets, partial(fitting_prompts, policy=policy, first=world.lead))
    prompts = PromptStream(rows, plan.samples // cfg.rollout.n, data.seed)
    components = JobComponents(world, rewards, policy, None, val_sets, exact=cfg.rollout.facts.exact)
    if world.samples:
        part = part_of(plan, cfg, world)
        decoded = plan.rollout_micro if cfg.rollout.partial_rollout else cfg.rollout.micro_batch_size_per_gpu
        decoded = decoded or part.per_rank
        passes = scoring(plan, algorithm, cfg.rollout)
        rollout = build_rollout(cfg, policy, world, decoded, passes, environments)
        if cfg.rollout.partial_rollout:
            if not isinstance(rollout, LMRollout) or type(rollout).decode is not LMRollout.decode:
                raise ConfigError(
                    f"{cfg.rollout:engine}: {cfg.rollout.engine} draws whole responses; expected one with a `session`, "
                    f"which draws tokens, or leave {cfg.rollout:partial_rollout} out"
                )
            rollout = PartialRollout(rollout, plan.samples // cfg.rollout.n)
        components = replace(components, rollout=rollout, exact=rollout.exact)
        if world.role == ROLLOUT:
            return RolloutWorker(cfg, part, components, prompts)
    teachers = {teacher.name: load_teacher(teacher, cfg, policy, world) for teacher in algorithm.teachers}
    critic: CriticTrainer | None = None
    if cfg.algorithm.needs_critic:
        model = build_critic(cfg.critic.model, cfg.parallel, policy, cfg.trainer.seed)
        critic = CriticTrainer(model, cfg.critic, cfg.actor, plan, world, cfg.trainer.critic_warmup)
    # Without token budget or packing all passes have one shape and cost the same; images never move between ranks.
    balances = cfg.trainer.balance_batch and plan.by_tokens and policy.vision is None
    costs = policy.sample_flops if balances else None
    trainer = build_trainer(cfg, plan, algorithm, components, prompts, teachers, critic, costs)
    if world.lead:
        held_out_overlap(rows, [p for some in val_sets.values() for p in some])
    return trainer


def check_images(cfg: LMRLConfig, subject: str) -> None:
    """Raise ConfigError for options that do not work with policies that read images; `subject` begins the message."""
    limits = (
        (
            cfg.environment.used and cfg.rollout.facts.weights != "policy",
            f"environments and {cfg.rollout:engine=}; set {cfg.rollout:engine}=policy",
        ),
        (bool(cfg.placement), "ranks with roles; leave placement out"),
        (bool(build_algorithm(cfg).teachers), "teachers; choose an algorithm without them"),
        (cfg.model.block_size is not None, f"block diffusion; leave {cfg.model:block_size} out"),
        (cfg.parallel.ulysses_sequence_parallel_size > 1, f"context parallelism; set {KEY} to 1"),
    )
    for unsupported, message in limits:
        if unsupported:
            raise ConfigError(f"{subject}, which is not supported with {message}")


def check_counts(rows: Sequence[Prompt], limit: int | None) -> None:
    """Raise ConfigError for the first row with more images than rollout.limit_images allows."""
    for row in rows:
        if limit is not None and len(row.images) > limit:
            raise ConfigError(f"{row.place} has {len(row.images)} images, more than rollout.limit_images={limit}")


def load_policy(
    cfg: LMRLConfig, world: World, plan: BatchPlan | None = None, *, frozen: bool = False, images: bool = False
) -> LMPolicy:
    """Load the policy from the model's folder. plan: says whether samples are packed; None: the keys alone. frozen:
    train nothing of it. images: prompts may contain images.

    Raises ValueError for a model that cannot be trained.
    """
    model = cfg.model if plan is None else as_planned(cfg.model, plan)
    options: dict[str, Any] = {
        "chunk": cfg.actor.log_prob_chunk_size,
        "temperature": cfg.rollout.temperature,
        "seed": cfg.trainer.seed,
        "trim": cfg.actor.use_dynamic_bsz,
    }
    if cfg.model.block_size is None:
        decodes = cfg.rollout.facts.weights == "policy"
        if Truncation.of(cfg.rollout).on:
            options["truncation"] = Truncation.of(cfg.rollout)
        options |= {"decodes": decodes, "frozen": frozen, "images": images}
        return build_policy(model, cfg.parallel, cfg.data, world, tries=cfg.model.use_remove_padding is None, **options)
    options["estimate"] = cfg.actor.log_prob_estimate
    return build_block_policy(cfg.model, cfg.parallel, cfg.data, world, **options)


def check(cfg: LMRLConfig, launch: Launch | None = None, *, installed: bool = True) -> BatchPlan:
    """Raise ConfigError for a configuration that the ranks of `launch` (None: the current one) cannot run, before ranks
    wait for one another. installed: whether the engine must be installed here.
    """
    batch_plan.check(cfg, build_algorithm(cfg))
    check_loggers(cfg.trainer.logger)
    batches = check_world(cfg, partial(checked, cfg, partial(plan, cfg)), launch or Launch.from_env())
    check_engine(cfg, installed=installed)
    return batches


def build_algorithm(cfg: LMRLConfig) -> Algorithm:
    """Build the algorithm; ConfigError for one that does not train on tokens."""
    algorithm = algorithms.build(cfg.algorithm)
    if not isinstance(algorithm, TokenAlgorithm):
        raise ConfigError(f"algorithm.name: {cfg.algorithm.name} does not train language models; expected such as grpo")
    return algorithm


def plan(cfg: LMRLConfig, world_size: int) -> BatchPlan:
    """The batch sizes of a step on `world_size` ranks; ConfigError with the numbers if they do not divide."""
    budget = cfg.token_budget if cfg.actor.use_dynamic_bsz else None
    algorithm = build_algorithm(cfg)
    result = batch_plan.plan(cfg, algorithm, world_size, micro=None if budget is None else 1)
    packed, adjacent = _packing(cfg, result, algorithm)
    prompts, age = result.samples // cfg.rollout.n, cfg.rollout.max_staleness
    drawn = drawn_at_once(cfg.rollout, prompts)
    if not prompts <= drawn <= prompts * (age + 1):
        raise ConfigError(
            f"{cfg.rollout:over_sampling_batch_size}: {drawn} should be {prompts} to {prompts * (age + 1)}: the "
            f"{prompts} prompts of a training step, and those that may wait for {cfg.rollout:max_staleness}={age} steps"
        )
    # the number decoded together does not affect log-probs: these are computed in passes of the training's shape
    decoded = cfg.rollout.micro_batch_size_per_gpu or -(-drawn * cfg.rollout.n // world_size)
    exact = budget is None and not packed
    return replace(result, rollout_micro=decoded, exact=exact, budget=budget, packed=packed, adjacent=adjacent)


def _packing(cfg: LMRLConfig, plan: BatchPlan, algorithm: Algorithm) -> tuple[bool, bool]:
    """Whether samples are packed, and whether those of a prompt go into the same pass, to share it.

    Unless the keys say so, only where no other key excludes it, and where old log-probabilities are none of a pass of
    another shape: they are those of the training pass itself, or passes are split by tokens in any case.
    """
    model = cfg.model
    packed, shared = model.use_remove_padding, model.use_prefix_grouper
    if packed is not None or shared:
        return packed is not False, bool(shared)
    free = cfg.actor.use_dynamic_bsz or (cfg.rollout.facts.exact and scoring(plan, algorithm, cfg.rollout) is None)
    others = cfg.parallel.ulysses_sequence_parallel_size > 1 or bool(algorithm.teachers)
    others = others or model.block_size is not None or cfg.critic.model.path is not None
    packed = free and not others and model.attn_implementation in ("sdpa", "flash_attention_2")
    return packed, packed and shared is None and model.attn_implementation == "sdpa"


def as_planned(model: LMModelConfig, plan: BatchPlan) -> LMModelConfig:
    """`model` with the packing of the plan."""
    return copy_with(model, use_remove_padding=plan.packed, use_prefix_grouper=plan.adjacent)


def as_loaded(plan: BatchPlan, policy: LMPolicy) -> BatchPlan:
    """The plan with what the policy does of it."""
    packed = bool(policy.config.use_remove_padding)
    adjacent, exact = bool(policy.config.use_prefix_grouper), plan.budget is None and not packed
    return replace(plan, exact=exact, packed=packed, adjacent=adjacent)


def scoring(plan: BatchPlan, algorithm: Algorithm, config: LMRolloutConfig) -> Passes | None:
    """The passes that compute old log-probabilities; None if each sample is trained only once, under the weights that
    sampled it: then the training pass provides them.
    """
    once = plan.updates * plan.epochs == 1 and config.schedule != "one_step_off"
    # references run before the training pass, and with truncated sampling need the kept tokens that rescoring finds
    once = once and not (algorithm.references and Truncation.of(config).on)
    # advantages per action and custom losses may need the old log-probs before the training pass
    if once and not algorithm.per_action and type(algorithm).loss is TokenAlgorithm.loss:
        return None
    return plan.passes_of(1)
