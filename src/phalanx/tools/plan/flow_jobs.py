"""Planned jobs of flow-matching models, see phalanx.tools.plan.jobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig, FlowRunConfig
from phalanx.config.section import reported_by
from phalanx.config.trained_model import FlowModelConfig
from phalanx.models.flow.folder import read_index
from phalanx.rollout.flow.dataset import DatasetRollout
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.run.flow_components import keep_last_steps
from phalanx.run.flow_kind import Flow, stochastic_steps
from phalanx.run.flow_matching import ENCODED_TOGETHER, FlowMatching, Training
from phalanx.run.flow_teacher import ContextFlowTeacher, LoadedFlowTeacher, check_kind, load_teacher
from phalanx.tools.plan.blueprint import PlannedFlowPolicy, fetch, planned_policy
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.ledger import Ledger
from phalanx.tools.plan.rehearsal import Blank, RLRehearsal, SupervisedRehearsal, busiest_rank, longest_prompts
from phalanx.training.components import taught_model
from phalanx.training.minibatches import BatchPlan
from phalanx.types import TEACHER, Teacher


def rehearsed(kind: Flow, cluster: Cluster, plan: BatchPlan, *, teaches: bool, learns: bool) -> RLRehearsal:
    """The window is at its last possible place; nothing is trained on the samples of a frozen policy."""
    cfg: FlowRLConfig = kind.cfg
    algorithm, c, facts = kind.build_algorithm(), cfg.rollout, cfg.rollout.facts
    rank, window = busiest_rank(cfg, plan, cluster), not plan.forward and learns
    detach = cfg.actor.detach_uncond
    policy = planned_policy(cfg, cluster, Ledger(), rank=rank, detach_uncond=detach, frozen=not learns)
    if window:
        end = c.num_inference_steps - 1 if c.sde_window_range is None else c.sde_window_range[1]
        c = replace(c, sde_window_range=[end - stochastic_steps(cfg), end])
    make = DatasetRollout if facts.columns else PolicyRollout if facts.weights == "policy" else _Engine
    rollout: PolicyRollout = make(policy, c, policy.world, plan.rollout_micro, window=window)
    rollout.facts = facts
    prompts = longest_prompts(policy, plan.samples // c.n, facts.columns)
    keep_last_steps(policy, rollout, algorithm.last_steps, cfg.model)
    teachers: dict[str, LoadedFlowTeacher] = {}
    for teacher in algorithm.teachers if teaches else ():
        teachers[teacher.name] = _planned_teacher(teacher, cfg, policy, rollout.micro_batch_size)
    if teaches and TEACHER in algorithm.averages:
        teachers[TEACHER] = ContextFlowTeacher(
            policy, policy, cfg, rollout.micro_batch_size, vars(cfg.algorithm)["teacher_guidance"]
        )
    with policy.ledger, policy.ledger.uncounted():
        return RLRehearsal(cfg, plan, algorithm, policy, rollout, prompts, teachers, learns=learns)


def rehearsed_matching(kind: Training, cluster: Cluster, *_: Any, **__: Any) -> SupervisedRehearsal:
    """A step of flow matching."""
    cfg: FlowMatchingTaskConfig = kind.cfg
    policy, r = planned_policy(cfg, cluster, Ledger()), cfg.rollout
    rollout = PolicyRollout(policy, r, policy.world, r.micro_batch_size_per_gpu or kind.together)
    flops = policy.model.flops(r.height, r.width, policy.text_tokens)
    with policy.ledger, policy.ledger.uncounted():
        images = _Images(cfg, cfg.parallel.data_ranks(cluster.ranks))
        task = FlowMatching(cfg, policy, rollout, images, policy.world)  # type: ignore[arg-type]
        return SupervisedRehearsal(cfg, policy, rollout, task, cfg.flow_matching.ema, flops)


class _Engine(PolicyRollout):
    """The part of a rollout beside a sampling engine that needs none of the policy's modules."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        with torch.no_grad():
            yield


def _planned_teacher(teacher: Teacher, cfg: FlowRLConfig, student: PlannedFlowPolicy, micro: int) -> LoadedFlowTeacher:
    """As load_teacher; text encoders with the same shapes count as equal."""
    with reported_by({"model": taught_model(teacher, cfg.model)}):
        folder = fetch(teacher.path, teacher.revision)
        kind = read_index(Path(folder))["_class_name"]
    check_kind(teacher, kind, read_index(Path(cfg.model.path))["_class_name"])

    def build(model: FlowModelConfig, *args: Any, **options: Any) -> PlannedFlowPolicy:
        taught, rank = replace(cfg, model=model), student.world.data_rank
        return planned_policy(taught, student.layout.cluster, student.ledger, rank=rank, frozen=True)

    local = replace(teacher, path=folder, revision=None)
    return load_teacher(local, cfg, student, micro, build)


@dataclass(frozen=True)
class _Images:
    """Images of flow matching's data, with a prompt each."""

    cfg: FlowRunConfig
    ranks: int

    def __len__(self) -> int:
        return self.cfg.data.batch_size(self.ranks) * ENCODED_TOGETHER

    def image(self, i: int) -> Tensor:
        return Blank().pixels(self.cfg.rollout.height, self.cfg.rollout.width)

    def prompt(self, i: int) -> str:
        return f"prompt {i}"
