"""Flow-matching models: the parts of their jobs, see phalanx.run.kind."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from phalanx.config.flow import FlowRunConfig
from phalanx.config.messages import ConfigError, told_as
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import ROLLOUT, World
from phalanx.functional.window import sde_window, trained_count
from phalanx.models.flow.pipeline_headers import local_index
from phalanx.models.flow.policy import FlowPolicy, build_policy
from phalanx.models.flow.registry import family_of, image_columns
from phalanx.models.trained import TrainedModel
from phalanx.rollout.flow import build_rollout
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.flow.samplers import train_sampler, val_sampler
from phalanx.run import batch_plan, rules
from phalanx.run.disaggregated.role_batches import of_role
from phalanx.run.flow_components import (
    check_plan,
    check_references,
    fitting,
    keep_last_steps,
    name_unused_columns,
    sampled_parts,
)
from phalanx.run.flow_teacher import ContextFlowTeacher, check_teacher, guided_reference, load_teacher, with_context
from phalanx.run.kind import PolicyKind, Schemas, Sets
from phalanx.run.roles import Roles
from phalanx.training.minibatches import BatchPlan
from phalanx.types import TEACHER, Algorithm, Prompt

log = logging.getLogger(__name__)


class Flow(PolicyKind):
    """A flow-matching model in diffusers' format."""

    schemas: ClassVar[Schemas] = (FlowRunConfig,)
    outputs = noun = drawn = "images"
    of_tokens = False
    shares = True
    words = "a flow-matching model"
    command = "tasks/sample.py"
    planner = "phalanx.tools.plan.flow_jobs:rehearsed"

    @classmethod
    def owns(cls, folder: Path) -> bool:
        return (folder / "model_index.json").is_file()

    @staticmethod
    def check_folder(path: str, key: str) -> None:
        local_index(path)

    def check_config(self) -> None:
        algorithm = self.build_algorithm()
        rules.check_start(self.cfg, algorithm)
        if algorithm.levels is None:
            stochastic_steps(self.cfg)

    def check_roles(self, roles: Roles, launch: Launch) -> Any:
        plan = super().check_roles(roles, launch)
        if roles.collocated:
            return plan
        part = of_role(plan, self.cfg, roles, ROLLOUT)
        if part.per_rank % part.rollout_micro:  # the last pass would have another shape than the replay
            raise ConfigError(
                f"{self.cfg.actor:ppo_micro_batch_size_per_gpu}: the rollout's passes of {part.rollout_micro} samples "
                f"do not divide the {part.per_rank} of each of its {len(roles.ranks[ROLLOUT])} ranks; change that, or "
                "placement"
            )
        return plan

    def check_model(self) -> None:
        cfg = self.cfg
        check_plan(cfg)
        family = family_of(cfg.model)
        if cfg.rollout.facts.columns and not family.encodes_images:
            raise ConfigError(
                f"{cfg.rollout:engine:} trains on images of the data, which {family.pipeline_class} "
                f"cannot encode; set {cfg.rollout:engine}=policy"
            )
        train_sampler(cfg.rollout, family)
        val_sampler(cfg.rollout, family)

    def plan(self, ranks: int) -> Any:
        algorithm = self.build_algorithm()
        actions = algorithm.levels  # or steps at which each sample is trained
        if actions is None:
            actions = trained_count(stochastic_steps(self.cfg), self.cfg.rollout.timestep_fraction)
        return batch_plan.plan(self.cfg, algorithm, ranks, actions=actions)

    def form(self, *, answered: bool = False, train: bool = False) -> dict[str, Any]:
        columns = self.cfg.rollout.facts.columns if train else ()
        return super().form() | {"images": (*image_columns(self.cfg.model), *columns)}

    def prepare(self, rows: list[Prompt], sets: Sets, entries: Mapping[str, Any] | None = None) -> tuple[Any, Sets]:
        filters = self.cfg.data.unusable_rows == "filter"
        for teacher in self.build_algorithm().teachers if rows else ():
            check_teacher(teacher, self.cfg.model)
        self.check_rows(() if filters else chain(rows, *sets.values()))
        return rows, sets

    def check_rows(self, rows: Iterable[Prompt]) -> None:
        check_references(self.cfg.model, rows)

    def fit(self, rows: list[Prompt], key: str, policy: FlowPolicy) -> list[Prompt]:
        context = vars(vars(self.cfg).get("algorithm", self.cfg)).get("context_key")
        if context is not None and key == "data.train_files":
            rows = with_context(rows, context)
            longer = [replace(row, text=str(row.told)) for row in rows]
            if len(fitting(longer, f"{key}, column {context}", policy.model, self.cfg, first=False)) < len(rows):
                raise ConfigError(f"{key}: texts in the column {context} do not fit data.max_prompt_length; raise it")
        return fitting(rows, key, policy.model, self.cfg, first=policy.world.lead)

    def name_unused(self, rows: list[Prompt], sets: Sets, policy: FlowPolicy) -> None:
        name_unused_columns(sampled_parts(rows, sets, self.cfg.rollout, policy.model), policy.model)

    def load_policy(self, world: World, plan: BatchPlan | None = None, *, frozen: bool = False) -> FlowPolicy:
        cfg = self.cfg
        detach, seed = plan is not None and cfg.actor.detach_uncond, cfg.trainer.seed
        return build_policy(cfg.model, cfg.parallel, cfg.data, world, seed=seed, detach_uncond=detach, frozen=frozen)

    def adapted(self, policy: FlowPolicy, trained: TrainedModel) -> FlowPolicy:
        return super().adapted(policy.through(trained.module), trained)

    def as_loaded(self, plan: BatchPlan, policy: FlowPolicy) -> BatchPlan:
        rollout = self.cfg.rollout
        if (
            rollout.facts.exact
            and not plan.exact
            and not plan.forward
            and policy.trained.parameters
            and policy.world.lead
        ):
            log.warning(
                "%s %d is not ppo_micro_batch_size_per_gpu x window = %d: log-probs of rollout and replay may differ "
                "in the last bits (see actor/first_ratio_error)",
                f"{rollout:micro_batch_size_per_gpu}",
                plan.rollout_micro,
                plan.micro * plan.actions,
            )
        return plan

    def train_rollout(
        self, policy: FlowPolicy, plan: BatchPlan, algorithm: Algorithm, *, learns: bool = True
    ) -> PolicyRollout:
        # samples that are not trained on need no exploration
        world, window = policy.world, algorithm.levels is None and learns
        rollout = build_rollout(policy, self.cfg.rollout, world, plan.rollout_micro, window=window)
        keep_last_steps(policy, rollout, algorithm.last_steps, self.cfg.model)
        return rollout

    def val_rollout(self, policy: FlowPolicy) -> PolicyRollout:
        config, world = self.cfg.rollout, policy.world
        return build_rollout(policy, config, world, config.micro_batch_size_per_gpu or self.together, window=False)

    def load_beside(self, policy: FlowPolicy, plan: BatchPlan, algorithm: Algorithm, rollout: Any) -> dict[str, Any]:
        cfg, micro, teachers = self.cfg, plan.rollout_micro, dict[str, Any]()
        for teacher in algorithm.teachers:
            teachers[teacher.name] = load_teacher(teacher, cfg, policy, micro)
        if TEACHER in algorithm.averages:
            teachers[TEACHER] = ContextFlowTeacher(policy, policy, cfg, micro, cfg.algorithm.teacher_guidance)
        scale = vars(cfg.algorithm).get("reference_guidance")
        if scale is not None:
            teachers["reference"] = guided_reference(scale, cfg, policy, micro)
        # encode the teachers' prompts together with the policy's, so that all text encoders are on the device only
        # before a rollout and never during training
        for loaded in teachers.values() if rollout is not None else ():
            rollout.ahead.encoders.append(loaded.encode)
        return {"teachers": teachers}

    def files(self, config: Any) -> Any:
        return family_of(config)


def stochastic_steps(cfg: Any) -> int:
    """Number of stochastic steps in the window; ConfigError if the window does not fit the schedule."""
    r = cfg.rollout
    with told_as(ConfigError):
        window = sde_window(
            0,
            num_inference_steps=r.num_inference_steps,
            size=r.sde_window_size,
            window_range=r.sde_window_range,
            schedule=r.window_schedule,
            iters=r.window_iters,
            seed=0,
        )
    return len(window)
