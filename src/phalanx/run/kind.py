"""A kind of policy: the parts that its jobs are made of, and what the commands ask of it.

A kind is a subclass of PolicyKind, or of Kind if its job has several policies, in a module of its own, and a line of
KINDS.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from phalanx import algorithms
from phalanx.config.messages import ConfigError
from phalanx.config.registry import resolve_object
from phalanx.config.run import RunConfig
from phalanx.data.prompts import validation_sets
from phalanx.distributed.collectives import same_everywhere
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import ACTOR, ROLLOUT, World
from phalanx.distributed.placement import place
from phalanx.models.meeting import here, shared
from phalanx.models.trained import TrainedModel
from phalanx.rewards.runner import RewardSet
from phalanx.rollout.registry import check_installed
from phalanx.run import batch_plan, rules
from phalanx.run.disaggregated.role_batches import of_role
from phalanx.run.keep_best import check_sets
from phalanx.run.roles import Roles
from phalanx.run.start import JobComponents, build_rewards, fitting_sets
from phalanx.run.usable_images import usable_images
from phalanx.run.world import check_world
from phalanx.telemetry.loggers import check_loggers
from phalanx.training.components import Tell, TrainedPolicy
from phalanx.training.minibatches import BatchPlan
from phalanx.types import Algorithm, Prompt, Rollout

# The class of each kind by the name that its configuration gives as `kind`. A run's config.yaml is read by the first
# kind that knows all its keys; a model folder that no other kind `owns` is of the first one.
KINDS = {
    "lm": "phalanx.run.lm_kind:LM",
    "blocks": "phalanx.run.lm_kind:Blocks",
    "block_diffusion": "phalanx.run.block_diffusion_sft:Training",
    "flow": "phalanx.run.flow_kind:Flow",
    "flow_matching": "phalanx.run.flow_matching:Training",
    "joint": "phalanx.run.joint_rl:Joint",
}
Schemas = tuple[type[RunConfig], ...]
Sets = dict[str, list[Prompt]]  # held-out prompts by name


class Kind:
    """A kind of policy, under the configuration `cfg` of a job or of a run. ConfigError and ValueError of its methods
    are the user's mistakes, in one line.
    """

    schemas: ClassVar[Schemas] = ()  # of a run's config.yaml, see phalanx.config.tasks.read_run
    outputs: ClassVar[str] = "completions"  # what rewards score; or "images", also for videos
    noun: ClassVar[str] = "samples"  # the plural noun of its samples in metrics
    drawn: ClassVar[str] = "samples"  # and in plans
    section: ClassVar[str] = "actor"  # of the configuration, with the sizes of an update
    of_tokens: ClassVar[bool | None] = None  # whether its algorithms are TokenAlgorithms; None: any algorithm
    shares: ClassVar[bool] = False  # whether runs of a sweep share passes, or take turns step by step
    words: ClassVar[str] = "another kind of model"  # what its models are called in messages
    command: ClassVar[str] = ""  # the task that samples from its checkpoints
    planner: ClassVar[str] = ""  # `module:function` that makes its phalanx.tools.plan.rehearsal.Rehearsal
    together: ClassVar[int] = 1  # samples drawn together in validation, unless the configuration says

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    @classmethod
    def owns(cls, folder: Path) -> bool:
        """Whether a model folder is of this kind."""
        return False

    @staticmethod
    def check_folder(path: str, key: str) -> None:
        """Raise ValueError for a model folder that is incomplete."""

    def check(self, launch: Launch | None = None, *, installed: bool = True) -> Any:
        """The batch sizes of a step; ConfigError for a configuration that the ranks of `launch` (None: the current one)
        cannot run. Mistakes are found before ranks wait for one another. installed: whether the engine must be here.
        """
        self.check_config()
        check_loggers(self.cfg.trainer.logger)
        plan = check_world(self.cfg, self.check_roles, launch or Launch.from_env())
        if installed:
            check_installed(self.cfg.rollout)
        self.check_model()
        return plan

    def check_config(self) -> None:
        """Raise ConfigError for combinations that cannot work with any number of ranks."""
        rules.check_start(self.cfg, self.build_algorithm())

    def check_roles(self, roles: Roles, launch: Launch) -> Any:
        """The batch sizes of a step on the actor's ranks; ConfigError for a configuration that the roles cannot run."""
        cfg, rollout = self.cfg, self.cfg.rollout
        plan = self.plan(cfg.parallel.data_ranks(len(roles.ranks[ACTOR])))
        for role in () if roles.collocated else roles.ranks:
            of_role(plan, cfg, roles, role)
        if not roles.collocated and rollout.schedule == "pipelined" and rollout.parts % plan.updates:
            raise ConfigError(
                f"rollout.parts: {rollout.parts} parts do not divide over the {plan.updates} updates of a step; "
                f"expected a multiple of {plan.updates}"
            )
        if cfg.reward.model.path is not None:
            samplers = roles.launch(ROLLOUT, launch)
            place(cfg.reward.model, samplers.world_size, samplers.local_world_size)
        return plan

    def check_model(self) -> None:
        """Raise ConfigError for settings that do not fit the model folder."""

    def build_algorithm(self) -> Algorithm:
        """Build the algorithm; ConfigError for one of other kinds of policy."""
        algorithm, name = algorithms.build(self.cfg.algorithm), self.cfg.algorithm.name
        of_tokens = isinstance(algorithm, algorithms.TokenAlgorithm)
        if self.of_tokens and not of_tokens:
            raise ConfigError(f"algorithm.name: {name} does not train language models; expected such as grpo")
        if of_tokens and self.of_tokens is False:
            raise ConfigError(f"algorithm.name: {name} trains language models; expected such as flow_grpo")
        return algorithm

    def plan(self, ranks: int) -> Any:
        """The sizes of a step on `ranks` ranks, a BatchPlan; ConfigError with the numbers if they do not divide."""
        return batch_plan.plan(self.cfg, self.build_algorithm(), ranks)

    def form(self, *, answered: bool = False, train: bool = False) -> dict[str, Any]:
        """How data files, or those to `train` on, are read: see phalanx.data.prompts.load_prompts."""
        return {"prompt": self.cfg.data.prompt_key, "unusable": self.cfg.data.unusable_rows}

    def read_sets(self, *, answered: bool = False) -> Sets:
        """The held-out prompts; answered: see `form`. Raises ConfigError for a trainer.keep_best of none of them."""
        sets = validation_sets(self.cfg.data.val_files, **self.form(answered=answered))
        check_sets(self.cfg.trainer, sets)
        return sets

    def prepare(self, rows: list[Prompt], sets: Sets, entries: Mapping[str, Any] | None = None) -> tuple[Any, Sets]:
        """Check that the model can read these prompts and has the right teachers, and add what belongs to the prompts.
        entries: the tensors of the checkpoint that is loaded into it.
        """
        return rows, sets

    def check_rows(self, rows: Iterable[Prompt]) -> None:
        """Raise ValueError for rows whose images are not the expected ones."""

    def usable(self, rows: list[Prompt], sets: Sets, world: World) -> tuple[list[Prompt], Sets]:
        """The prompts whose images can be read; all ranks call this together. Raises DataError for the others unless
        data.unusable_rows is `filter`.
        """
        read = partial(usable_images, unusable=self.cfg.data.unusable_rows, world=world, check=self.check_rows)
        return read(rows, "data.train_files"), fitting_sets(sets, read)

    def fit(self, rows: list[Prompt], key: str, policy: Any) -> list[Prompt]:
        """The rows of the files `key` to use according to data.overlong_prompts."""
        return rows

    def fitting(self, rows: list[Prompt], sets: Sets, policy: Any) -> tuple[list[Prompt], Sets]:
        """The prompts to use according to data.overlong_prompts."""
        fit = partial(self.fit, policy=policy)
        rows, sets = fit(rows, "data.train_files") if rows else rows, fitting_sets(sets, fit)
        self.name_unused(rows, sets, policy)
        return rows, sets

    def name_unused(self, rows: list[Prompt], sets: Sets, policy: Any) -> None:
        """Log columns of the data that have no effect."""

    def as_loaded(self, plan: BatchPlan, policy: Any) -> BatchPlan:
        """The plan with what the policy does of it."""
        return plan

    def load_beside(self, policy: Any, plan: BatchPlan, algorithm: Algorithm, rollout: Any) -> dict[str, Any]:
        """The keywords teachers, critic and costs of phalanx.training.update.Updater, as far as the algorithm needs
        them; all ranks that train call this together. rollout: None if other ranks sample.
        """
        return {}


class PolicyKind(Kind, ABC):
    """A kind of job with one policy, which the commands can also load and sample from."""

    def parts(self) -> "dict[str, PolicyKind]":
        """The kind of each policy of a job by its name; a single policy is named ""."""
        return {"": self}

    @abstractmethod
    def load_policy(self, world: World, plan: BatchPlan | None = None, *, frozen: bool = False) -> Any:
        """Load the policy from the model's folder; all ranks call this together. plan: that of a step; None to sample
        only. frozen: train nothing of it.
        """

    def adapted(self, policy: Any, trained: TrainedModel) -> Any:
        """The policy with another LoRA on the same base; see TrainedModel.with_adapters."""
        other = copy.copy(policy)
        other.trained = trained
        return other

    @abstractmethod
    def train_rollout(self, policy: Any, plan: BatchPlan, algorithm: Algorithm, *, learns: bool = True) -> Rollout:
        """Build the engine that draws training samples. learns: they are trained on."""

    @abstractmethod
    def val_rollout(self, policy: Any) -> Any:
        """Build the engine that draws samples to score only."""

    def tell(self, policy: Any, rollout: Any) -> Tell | None:
        """See phalanx.training.collect.Collector."""
        return None

    @abstractmethod
    def files(self, config: Any) -> Any:
        """The files of a model: an object with the methods of phalanx.models.flow.model_files.ModelFiles."""


def kind_class(name: str) -> type[Kind]:
    """The class of the kind `name`."""
    return resolve_object(KINDS[name], f"kind={name}", "class")


def kind_of(cfg: Any) -> Any:
    """The kind of a configuration's policy, or of its job."""
    return kind_class(cfg.kind)(cfg)


def known_schemas() -> list[type[RunConfig]]:
    """The schemas of a run's config.yaml, of all kinds, those with the most sections first."""
    every = [schema for name in KINDS for schema in kind_class(name).schemas]
    return sorted(every, key=lambda schema: -len(fields(schema)))


def kind_of_folder(folder: Path) -> type[Kind]:
    """The kind of a model folder by its files."""
    first, *others = [kind_class(name) for name in KINDS]
    return next((kind for kind in others if kind.schemas and kind.owns(folder)), first)


def policy_of(kind: PolicyKind, world: World, plan: BatchPlan | None = None) -> Any:
    """The policy of a job; in a sweep, its adapter on the base that all runs share. See PolicyKind.load_policy."""
    seat = here()
    if seat is None:
        return kind.load_policy(world, plan)
    policy = shared("policy", lambda: kind.load_policy(world, plan))
    models = shared("adapters", lambda: policy.trained.with_adapters(shares=kind.shares))
    if models[0].shares and world.shard_size > 1:  # ranks gather weights together in each pass
        seat.meeting.agree = same_everywhere
    return kind.adapted(policy, models[seat.number])


def sampling_parts(kind: PolicyKind, world: World, sets: Sets, rewards: RewardSet | None = None) -> JobComponents:
    """The parts of a job that draws no training samples; all ranks call this together. rewards: None to load them."""
    rewards = rewards or build_rewards(kind.cfg, world, (), sets, outputs=kind.outputs)
    policy: TrainedPolicy = policy_of(kind, world)
    _, sets = kind.fitting([], sets, policy)
    return JobComponents(world, rewards, policy, kind.val_rollout(policy), sets, noun=kind.noun)
