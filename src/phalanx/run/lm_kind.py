"""Language models, causal or of block diffusion: the parts of their jobs, see phalanx.run.kind."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

from phalanx.algorithms import TokenAlgorithm
from phalanx.config.lm import LMRLConfig, LMRolloutConfig, LMRunConfig, LMTurnRunConfig
from phalanx.config.messages import ConfigError
from phalanx.config.section import copy_with
from phalanx.config.trained_model import LMModelConfig
from phalanx.data.unusable import UnusableRows, above_limit
from phalanx.distributed.mesh import World
from phalanx.distributed.passes import Passes
from phalanx.environments.environments import Environments, with_tools
from phalanx.functional.tokens import Truncation
from phalanx.models.lm import lm_export, vision_families
from phalanx.models.lm.blocks import BlockDiffusionPolicy, build_block_policy, load_blocks
from phalanx.models.lm.lm_folder import check_folder
from phalanx.models.lm.lm_policy import LMPolicy, build_policy
from phalanx.models.lm.load_folder import load_model, load_tokenizer
from phalanx.models.lm.model import DTYPES
from phalanx.models.lm.value_model import build_critic
from phalanx.rollout.lm import build_rollout
from phalanx.rollout.lm.given_responses import ANSWERS, read_answers, split_answers
from phalanx.rollout.lm.in_policy import LMRollout
from phalanx.rollout.lm.partial import PartialRollout, drawn_at_once
from phalanx.run import batch_plan
from phalanx.run.disaggregated.role_batches import part_of
from phalanx.run.kind import PolicyKind, Schemas, Sets
from phalanx.run.lm_context import Contexts, check_rows, with_column
from phalanx.run.lm_teacher import ContextTeacher, load_teacher
from phalanx.run.start import fitting_sets
from phalanx.training.critic_trainer import CriticTrainer
from phalanx.training.minibatches import BatchPlan
from phalanx.types import TEACHER, Algorithm, Prompt, Rollout

log = logging.getLogger(__name__)


class LM(PolicyKind):
    """A causal language model in transformers' format, which may read images, and talk with environments."""

    schemas: ClassVar[Schemas] = (LMTurnRunConfig, LMRunConfig)
    drawn = "responses"
    of_tokens = True
    words = "a language model"
    command = "tasks/generate.py"
    planner = "phalanx.tools.plan.lm_jobs:rehearsed"
    together = 8  # engines with their own copy of the weights form batches themselves

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.images = False  # whether prompts may have images
        self.environments: Environments | None = None

    @staticmethod
    def check_folder(path: str, key: str) -> None:
        check_folder(path, key)

    @property
    def written(self) -> bool:
        """Whether the responses to train on are those of the data."""
        return bool(self.cfg.rollout.facts.weights == "none")

    @property
    def tells(self) -> bool:
        """Whether a teacher reads more in its prompts than the policy."""
        return "algorithm" in vars(self.cfg) and "context_key" in vars(self.cfg.algorithm)

    def plan(self, ranks: int) -> Any:
        cfg: LMRLConfig = self.cfg
        budget = cfg.token_budget if cfg.actor.use_dynamic_bsz else None
        algorithm = self.build_algorithm()
        result = batch_plan.plan(cfg, algorithm, ranks, micro=None if budget is None else 1)
        packed, adjacent = _packing_choice(cfg, result, algorithm)
        prompts, ahead = result.samples // cfg.rollout.n, cfg.rollout.schedule == "one_step_off"
        age = max(cfg.rollout.max_staleness - ahead, 0)  # of responses when their step is drawn
        drawn = drawn_at_once(cfg.rollout, prompts)
        if not prompts <= drawn <= prompts * (age + 1):
            raise ConfigError(
                f"{cfg.rollout:partial_rollout}.over_sampling_batch_size: {drawn} should be {prompts} to "
                f"{prompts * (age + 1)}: the {prompts} prompts of a training step, and those that may wait for {age} "
                f"steps ({cfg.rollout:max_staleness}{', less the step that is sampled ahead' if ahead else ''})"
            )
        # the number decoded together does not affect log-probs: these are computed in passes of the training's shape
        decoded = cfg.rollout.micro_batch_size_per_gpu or -(-drawn * cfg.rollout.n // ranks)
        exact = budget is None and not packed
        return replace(result, rollout_micro=decoded, exact=exact, budget=budget, packed=packed, adjacent=adjacent)

    def form(self, *, answered: bool = False, train: bool = False) -> dict[str, Any]:
        data = self.cfg.data
        answered = answered or (train and self.written and data.response_key is None)
        return super().form() | {"quoted": False, "answered": answered, "image_key": data.image_key}

    def prepare(self, rows: list[Prompt], sets: Sets, entries: Mapping[str, Any] | None = None) -> tuple[Any, Sets]:
        """Also start the environments."""
        cfg = self.cfg
        if rows and self.written:
            rows = split_answers(rows, cfg.data)
        every = [*rows, *chain(*sets.values())]
        place = next((row.place for row in every if row.images), None)
        if place is not None:
            self.check_images(f"{place} has images")
            limit = cfg.rollout.limit_images
            for row in every if limit is not None else ():
                if len(row.images) > limit:
                    has = f"{row.place} has {len(row.images)} images"
                    raise ConfigError(f"{has}, more than rollout.limit_images={limit}")
        elif rows and cfg.data.image_key is not None:
            raise ConfigError(f"data.image_key: no row of the data files has images in a column {cfg.data.image_key!r}")
        self.images = reads_images(cfg.model, place, entries)
        if self.images and place is None and "actor" in vars(cfg):
            self.check_images(f"{cfg.model:path}: transformers has no text-only class for {cfg.model.path!r}")
        if not cfg.talks:
            return rows, sets
        environments = self.environments = Environments(cfg.environment)
        return with_tools(rows, environments), fitting_sets(sets, lambda some, _: with_tools(some, environments))

    def check_images(self, subject: str) -> None:
        """Raise ConfigError for options that do not work with models that read images; `subject` begins the message."""
        cfg, talks = self.cfg, self.cfg.talks and self.cfg.rollout.facts.weights == "copy"
        limits = (
            (talks, f"environments and {cfg.rollout:engine=}; set {cfg.rollout:engine}=policy"),
            (cfg.model.block_size is not None, f"block diffusion; leave {cfg.model:block_size} out"),
        )
        for unsupported, message in limits:
            if unsupported:
                raise ConfigError(f"{subject}, which is not supported with {message}")

    def fit(self, rows: list[Prompt], key: str, policy: LMPolicy) -> list[Prompt]:
        rows = fitting_prompts(rows, key, policy, first=policy.world.lead)
        if self.tells and key == "data.train_files":
            if self.cfg.algorithm.context == ["column"] and not self.images:
                rows = with_column(rows, policy, self.cfg.algorithm)
            else:
                check_rows(rows, self.cfg.algorithm)
        return read_answers(rows, policy, first=policy.world.lead) if ANSWERS in rows[0].meta else rows

    def load_policy(self, world: World, plan: BatchPlan | None = None, *, frozen: bool = False) -> LMPolicy:
        cfg, options = self.cfg, self.options()
        model = cfg.model if plan is None else as_planned(cfg.model, plan)
        if "actor" in vars(cfg):
            options["tries"] = cfg.model.use_remove_padding is None
            if Truncation.of(cfg.rollout).on:
                options["truncation"] = Truncation.of(cfg.rollout)
        options |= {"decodes": cfg.rollout.facts.weights != "copy", "frozen": frozen, "images": self.images}
        return build_policy(model, cfg.parallel, cfg.data, world, **options)

    def plain_policy(self, world: World, *, images: bool) -> LMPolicy:
        """The policy in model.dtype, to sample in one process. images: see build_policy."""
        cfg, model = self.cfg, self.cfg.model
        module = load_model(model, DTYPES[model.dtype], chunk=1, images=images)
        parts = module, load_tokenizer(model), world, model, cfg.parallel, cfg.data
        return LMPolicy(*parts, temperature=1.0, seed=cfg.trainer.seed)

    def options(self) -> dict[str, Any]:
        """Keywords of the policy for all kinds of language models."""
        cfg = self.cfg
        options = {"chunk": 1024, "temperature": cfg.rollout.temperature, "seed": cfg.trainer.seed}
        if "actor" in vars(cfg):
            options |= {"chunk": cfg.actor.log_prob_chunk_size, "trim": cfg.actor.use_dynamic_bsz}
        return options

    def as_loaded(self, plan: BatchPlan, policy: LMPolicy) -> BatchPlan:
        packed = bool(policy.config.use_remove_padding)
        adjacent, exact = bool(policy.config.use_prefix_grouper), plan.budget is None and not packed
        return replace(plan, exact=exact, packed=packed, adjacent=adjacent)

    def train_rollout(self, policy: LMPolicy, plan: BatchPlan, algorithm: Algorithm, *, learns: bool = True) -> Rollout:
        config, world, split = self.cfg.rollout, policy.world, self.cfg.rollout.partial_rollout
        prompts = plan.samples // config.n
        drawn = -(-drawn_at_once(config, prompts) * config.n // world.data_size)
        decoded = config.micro_batch_size_per_gpu or (drawn if split else part_of(plan, self.cfg, world).per_rank)
        passes = scoring(plan, algorithm, config) if learns else None
        rollout: Any = build_rollout(self.cfg, policy, world, decoded, passes, self.environments)
        if split is None:
            return rollout
        if not isinstance(rollout, LMRollout):
            raise ConfigError(
                f"{config:engine}: {config.engine} draws whole responses; expected one with a `session`, which draws "
                f"tokens, or leave {config:partial_rollout} out"
            )
        return PartialRollout(rollout, prompts)

    def val_rollout(self, policy: LMPolicy) -> Rollout:
        config = self.cfg.rollout
        decoded = config.micro_batch_size_per_gpu or (self.together if config.facts.weights != "copy" else 2**20)
        return build_rollout(self.cfg, policy, policy.world, decoded, None, self.environments)

    def load_beside(self, policy: LMPolicy, plan: BatchPlan, algorithm: Algorithm, rollout: Any) -> dict[str, Any]:
        cfg, world, beside = self.cfg, policy.world, dict[str, Any]()
        beside["teachers"] = {teacher.name: load_teacher(teacher, cfg, policy) for teacher in algorithm.teachers}
        if self.tells:
            beside["teachers"][TEACHER] = ContextTeacher(policy, policy)
        if cfg.algorithm.needs_critic:
            model = build_critic(cfg.critic.model, cfg.parallel, policy, cfg.trainer.seed)
            warmup = cfg.trainer.critic_warmup
            beside["critic"] = CriticTrainer(model, cfg.critic, cfg.actor, plan, world, warmup)
        # Without token budget or packing all passes have one shape and cost the same; images never move between ranks.
        if cfg.trainer.balance_batch and plan.by_tokens and policy.vision is None:
            beside["costs"] = policy.sample_flops
        return beside

    def tell(self, policy: LMPolicy, rollout: Any) -> Contexts | None:
        # the reset of an environment may add to a prompt, and images are read when they are needed
        late = self.tells and (self.cfg.talks or self.images or self.cfg.algorithm.context != ["column"])
        return Contexts(policy, rollout, self.cfg.algorithm) if late else None

    def files(self, config: Any) -> Any:
        return lm_export


class Blocks(LM):
    """A language model that denoises blocks of tokens."""

    schemas: ClassVar[Schemas] = ()
    adds_mask = False  # a mask token to the tokenizer of a base model that lacks it

    def plain_policy(self, world: World, *, images: bool) -> BlockDiffusionPolicy:
        cfg, model = self.cfg, self.cfg.model
        parts = load_blocks(model, DTYPES[model.dtype], chunk=1, add_mask=self.adds_mask)
        beside: dict[str, Any] = {"size": model.block_size, "estimate": "trace", "seed": cfg.trainer.seed}
        return BlockDiffusionPolicy(*parts, world, model, cfg.parallel, cfg.data, temperature=1.0, **beside)

    def load_policy(self, world: World, plan: BatchPlan | None = None, *, frozen: bool = False) -> BlockDiffusionPolicy:
        cfg, options = self.cfg, self.options() | {"add_mask": self.adds_mask, "frozen": frozen}
        if "actor" in vars(cfg):
            options["estimate"] = cfg.actor.log_prob_estimate
        else:
            options["temperature"] = 1.0
        return build_block_policy(cfg.model, cfg.parallel, cfg.data, world, **options)


def reads_images(config: LMModelConfig, place: str | None, entries: Mapping[str, Any] | None) -> bool:
    """Whether to load a model with its vision tower: there are prompts with images, the first at `place`, or the
    checkpoint that is loaded into it, whose tensors are `entries`, has one. Raises ValueError for images that it cannot
    read.
    """
    if place is not None and config.block_size is not None:
        raise ValueError(f"{place} has images, which block diffusion does not support; leave model.block_size out")
    if place is not None:
        vision_families.check(config, place)
        return True
    return vision_families.is_needed(config) if entries is None else lm_export.reads_images(entries)


def _packing_choice(cfg: LMRLConfig, plan: BatchPlan, algorithm: Algorithm) -> tuple[bool, bool]:
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


def scoring(plan: BatchPlan, algorithm: Algorithm, config: LMRolloutConfig) -> Passes | None:
    """The passes that compute old log-probabilities; None if each sample is trained only once, under the weights that
    sampled it: then the training pass provides them.
    """
    if config.facts.weights == "none":  # responses of the data were drawn by nobody's weights
        return None
    once = plan.updates * plan.epochs == 1 and config.schedule != "one_step_off"
    # references run before the training pass, and with truncated sampling need the kept tokens that rescoring finds
    once = once and not (algorithm.references and Truncation.of(config).on)
    # advantages per action and custom losses may need the old log-probs before the training pass
    if once and not algorithm.per_action and type(algorithm).loss is TokenAlgorithm.loss:
        return None
    return plan.passes_of(1)


def fitting_prompts(rows: list[Prompt], key: str, policy: LMPolicy, *, first: bool) -> list[Prompt]:
    """Return the rows to train on, according to data.overlong_prompts.

    Raises ValueError for a prompt that is too long if data.overlong_prompts is `error`, and if no row is left.
    """
    limit, overlong = policy.data.max_prompt_length, policy.data.overlong_prompts
    kept, drop = [], UnusableRows(key, policy.data.unusable_rows)
    policy.encode_ahead(rows)
    for number, row in enumerate(rows):
        try:
            length = policy.length(row)
        except ValueError as error:  # an image that the model does not take, such as one of 300 to 1
            drop(error)
            continue
        if length <= limit:
            kept.append(row)
        elif row.images and overlong != "filter":
            smaller = "lower data.max_pixels, " if policy.vision.family.sizes else ""
            raise ValueError(
                f"{row.place}: it has {length} tokens with the chat template, {policy.look(row).count} of "
                f"them of its images, more than data.max_prompt_length={limit}, and images are not cut; raise that, "
                f"{smaller}or set data.overlong_prompts to filter"
            )
        elif overlong == "error":
            where = f"{row.place or f'{key}, prompt {number}'}: it"
            raise above_limit(where, f"{length} tokens with the chat template", "data.max_prompt_length", limit)
    drop.report(len(rows) - len(drop.reasons))
    if not kept:
        raise ValueError(f"{key}: all {len(rows)} prompts are longer than data.max_prompt_length={limit}")
    dropped = len(rows) - len(drop.reasons) - len(kept)
    if first and dropped:
        log.warning("%s: %d of %d prompts have more than %d tokens and are left out", key, dropped, len(rows), limit)
    return kept
