"""A planned job on a cluster: its parts on the meta device, after a training step that a ledger counted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx import algorithms
from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig, FlowRunConfig
from phalanx.config.joint import WRITER, JointConfig, frozen
from phalanx.config.lm import LMRLConfig
from phalanx.config.reward import RewardModelConfig
from phalanx.config.run import RLConfig, RunConfig
from phalanx.config.section import reported_by
from phalanx.config.trained_model import FlowModelConfig
from phalanx.distributed import mesh
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT
from phalanx.models.flow.folder import read_index
from phalanx.rollout.flow.dataset import DatasetRollout
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.rollout.lm.policy_session import WASTE
from phalanx.rollout.lm.together import cache_bytes, fitting_together
from phalanx.run import block_diffusion_sft, flow_matching, flow_rl, joint_rl, lm_rl
from phalanx.run.disaggregated.role_batches import of_role
from phalanx.run.flow_components import keep_last_steps
from phalanx.run.flow_teacher import LoadedFlowTeacher, check_kind, load_teacher
from phalanx.run.roles import Roles, roles_of
from phalanx.tools.plan.blueprint import PlannedFlowPolicy, family_name, fetch, planned_policy
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.ledger import META, Ledger, fused_attention
from phalanx.tools.plan.lm_blueprint import PlannedBlockPolicy, PlannedBlockRollout, PlannedLMRollout, planned_lm_policy
from phalanx.tools.plan.rehearsal import (
    AnyPlannedPolicy,
    PlannedBlockDiffusion,
    Rehearsal,
    RLRehearsal,
    SupervisedRehearsal,
)
from phalanx.training.components import taught_model
from phalanx.training.minibatches import BatchPlan
from phalanx.types import Prompt, Teacher


@dataclass(frozen=True)
class Task:
    """Properties of a kind of job that the plan depends on.

    samples: the noun for what it samples or learns from, in the plural. section: the section of the configuration with
    the sizes of an update. check(cfg, launch) raises ConfigError for a job that the ranks of a launch cannot run.
    build(cfg, cluster, plan, teaches, learns) makes the job, with the algorithm's teachers if it `teaches`, and without
    training if it does not learn. plan(cfg, ranks): the batch arithmetic of reinforcement learning; None for supervised
    training.
    """

    samples: str
    section: str
    check: Callable[..., object]
    build: Callable[..., Rehearsal]
    plan: Callable[[Any, int], BatchPlan] | None = None


def task_of(cfg: RunConfig) -> Task:
    """The task of a configuration's class, or of its first base class that has one."""
    return next(_TASKS[kind] for kind in type(cfg).__mro__ if kind in _TASKS)


def policies_of(cfg: RunConfig | JointConfig) -> dict[str, RunConfig]:
    """The configuration of each policy of a joint run by its name; of another job, the configuration itself by ""."""
    return {**cfg.parts()} if isinstance(cfg, JointConfig) else {"": cfg}


def locate(cfg: RunConfig | JointConfig) -> None:
    """Have the configuration name local folders of its models, and the families of flow models."""
    for part in policies_of(cfg).values():
        with reported_by(vars(part)):
            part.model.path = fetch(part.model.path, part.model.revision)
            if isinstance(part, FlowRunConfig):
                part.model.family = family_name(part.model)


def check(cfg: RunConfig | JointConfig, launch: Launch) -> None:
    """Raise ConfigError for a job that the ranks of a launch cannot run."""
    if isinstance(cfg, JointConfig):
        joint_rl.check(cfg, launch, installed=False)
    else:
        task_of(cfg).check(cfg, launch)


def roles_on(cfg: RunConfig, c: Cluster) -> Roles:
    """The roles of a cluster's ranks; ConfigError if the placement does not fit it."""
    return roles_of(cfg.placement if isinstance(cfg, RLConfig) else {}, c.launch)


def parts_of(cfg: RunConfig | JointConfig, cluster: Cluster) -> list[Rehearsal]:
    """The parts of a job that are planned one by one: policies of a joint run, ranks of each role, or the whole job."""
    if isinstance(cfg, JointConfig):
        return planned_joint(cfg, cluster)
    roles = roles_on(cfg, cluster)
    if not isinstance(cfg, RLConfig) or roles.collocated:
        return [planned(cfg, cluster)]
    return [planned_role(cfg, cluster, roles, role) for role in (ROLLOUT, INFERENCE, ACTOR) if role in roles.ranks]


def planned(
    cfg: RunConfig,
    cluster: Cluster,
    *,
    plan: BatchPlan | None = None,
    role: str = "",
    part: str = "",
    learns: bool = True,
    rescores: bool = True,
) -> Rehearsal:
    """The job on a cluster that it can run on, after a validation, if one is due, and a step; takes seconds.

    plan: None for that of the job; other options: see Rehearsal. The configuration is a located one. Raises ValueError
    for a model folder that cannot be read.
    """
    task = task_of(cfg)
    if plan is None and task.plan is not None:
        plan = task.plan(cfg, cfg.parallel.data_ranks(cluster.ranks))
    with mesh.alone(cfg.parallel.ulysses_sequence_parallel_size), fused_attention():
        job = task.build(cfg, cluster, plan, teaches=role in ("", ACTOR) and not part, learns=learns)
        job.role, job.part, job.rescores = role, part, rescores and learns
        due = cfg.trainer.test_freq > 0 or cfg.trainer.val_before_train
        with job.ledger:
            if due and cfg.data.val_files and cfg.reward.functions and role in ("", ROLLOUT):
                few = -(-job.rollout.micro_batch_size // cfg.rollout.val.n)
                job.run_validation(_prompts(job.policy, few))
            job.run_step()
    return job


def planned_joint(cfg: JointConfig, cluster: Cluster) -> list[Rehearsal]:
    """The writer and the painter of a joint run; see `planned`."""
    jobs = []
    for name, part in cfg.parts().items():
        if name not in cfg.train:
            part.model = frozen(part.model)
        if name == WRITER:  # the reward model is the painter's
            part.reward = replace(part.reward, model=RewardModelConfig())
            if cfg.rewrite.validate == ["original"]:
                part.reward = replace(part.reward, functions=[])
        with reported_by(vars(part)):
            jobs.append(planned(part, cluster, part=name, learns=name in cfg.train))
    writer, painter = jobs
    writer.waiting, painter.waiting = (0, painter.samples_size), (writer.samples_size, 0)
    return jobs


def planned_role(cfg: RLConfig, cluster: Cluster, roles: Roles, role: str) -> Rehearsal:
    """The part of the job that the ranks of a role run, which are a separate world."""
    task, launch = task_of(cfg), roles.launch(role, cluster.launch)
    assert task.plan is not None, "only samples are drawn elsewhere"
    plan = task.plan(cfg, len(roles.ranks[ACTOR]))  # the actor's is of the whole step, those of others of a part
    if role != ACTOR:
        plan = of_role(plan, cfg, roles, role)
    width, node = mesh.role_width(cfg.parallel, launch, role), launch.local_world_size
    cfg = replace(cfg, parallel=replace(cfg.parallel, fsdp_size=width))
    smaller = replace(cluster, nodes=launch.world_size // node, per_node=node)
    rescores = role == (INFERENCE if INFERENCE in roles.ranks else ACTOR)
    return planned(cfg, smaller, plan=plan, role=role, rescores=rescores)


def train_again(job: Rehearsal, recomputed: int) -> None:
    """Repeat a planned job's updates with `recomputed` blocks recomputed in backward passes."""
    job.state.updates_made = job.state.micro_batches = 0
    job.ledger.forget("update")
    job.policy.recompute(recomputed)
    with mesh.alone(job.cfg.parallel.ulysses_sequence_parallel_size), fused_attention(), job.ledger:
        job.train()


# -- builders of each kind ----------------------------------------------------------------------------------------


def _busiest(cfg: RLConfig, plan: BatchPlan, cluster: Cluster) -> int:
    """The rank whose samples belong to the most prompts."""
    n, each, ranks = cfg.rollout.n, plan.per_rank, cfg.parallel.data_ranks(cluster.ranks)
    return max(range(ranks), key=lambda rank: ((rank + 1) * each - 1) // n - rank * each // n)


def _lm(cfg: LMRLConfig, cluster: Cluster, plan: BatchPlan, teaches: bool, learns: bool) -> RLRehearsal:
    algorithm, actor, blocks = lm_rl.build_algorithm(cfg), cfg.actor, cfg.model.block_size is not None
    options: dict[str, Any] = {"chunk": actor.log_prob_chunk_size, "frozen": not learns}
    if blocks:
        options["estimate"] = actor.log_prob_estimate
    given, tries = replace(cfg, model=lm_rl.as_planned(cfg.model, plan)), cfg.model.use_remove_padding is None
    policy = planned_lm_policy(given, cluster, Ledger(), rank=_busiest(cfg, plan, cluster), tries=tries, **options)
    plan, decoded = lm_rl.as_loaded(plan, policy), cfg.rollout.micro_batch_size_per_gpu or plan.per_rank
    if cfg.rollout.micro_batch_size_per_gpu is None and cfg.rollout.facts.weights == "policy":
        each = cache_bytes(cfg, policy)
        decoded = fitting_together(decoded, each, cluster.gpu_memory, policy.world.context_size)
    plan = replace(plan, rollout_micro=decoded)
    passes = lm_rl.scoring(plan, algorithm, cfg.rollout) if learns else None
    kind = PlannedBlockRollout if blocks else PlannedLMRollout
    rollout = kind(policy, cfg.rollout, policy.world, plan.rollout_micro, passes)
    rollout.facts, rollout.most = cfg.rollout.facts, cfg.most_states if blocks else 0
    # samples that wait for an answer, or begin while others are drawn, have empty columns
    if cfg.environment.used or plan.rollout_micro < plan.per_rank:
        rollout.waste = WASTE
    with policy.ledger, policy.ledger.uncounted():
        prompts = _prompts(policy, plan.samples // cfg.rollout.n)
        return RLRehearsal(cfg, plan, algorithm, policy, rollout, prompts, learns=learns)


def _flow(cfg: FlowRLConfig, cluster: Cluster, plan: BatchPlan, teaches: bool, learns: bool) -> RLRehearsal:
    """The window is at its last possible place; nothing is trained on the samples of a frozen policy."""
    algorithm, c, facts = algorithms.build(cfg.algorithm), cfg.rollout, cfg.rollout.facts
    rank, window = _busiest(cfg, plan, cluster), not plan.forward and learns
    detach = cfg.actor.detach_uncond
    policy = planned_policy(cfg, cluster, Ledger(), rank=rank, detach_uncond=detach, frozen=not learns)
    if window:
        end = c.num_inference_steps - 1 if c.sde_window_range is None else c.sde_window_range[1]
        c = replace(c, sde_window_range=[end - flow_rl.stochastic_steps(cfg), end])
    kind = DatasetRollout if facts.columns else PolicyRollout if facts.weights == "policy" else _Engine
    rollout: PolicyRollout = kind(policy, c, policy.world, plan.rollout_micro, window=window)
    rollout.facts = facts
    prompts = _prompts(policy, plan.samples // c.n, facts.columns)
    keep_last_steps(policy, rollout, algorithm.last_steps, cfg.model)
    teachers = {}
    for teacher in algorithm.teachers if teaches else ():
        teachers[teacher.name] = _teacher(teacher, cfg, policy, rollout.micro_batch_size)
    with policy.ledger, policy.ledger.uncounted():
        return RLRehearsal(cfg, plan, algorithm, policy, rollout, prompts, teachers, learns=learns)


def _flow_matching(cfg: FlowMatchingTaskConfig, cluster: Cluster, *_: Any, **__: Any) -> SupervisedRehearsal:
    policy, r = planned_policy(cfg, cluster, Ledger()), cfg.rollout
    rollout = PolicyRollout(policy, r, policy.world, r.micro_batch_size_per_gpu or 16)
    flops = policy.model.flops(r.height, r.width, policy.text_tokens)
    with policy.ledger, policy.ledger.uncounted():
        images = _Images(cfg, cfg.parallel.data_ranks(cluster.ranks))
        task = flow_matching.FlowMatching(cfg, policy, rollout, images, policy.world)  # type: ignore[arg-type]
        return SupervisedRehearsal(cfg, policy, rollout, task, cfg.flow_matching.ema, flops)


def _block_diffusion(cfg: BlockDiffusionTaskConfig, cluster: Cluster, *_: Any, **__: Any) -> SupervisedRehearsal:
    policy = planned_lm_policy(cfg, cluster, Ledger(), chunk=cfg.block_diffusion.log_prob_chunk_size)
    assert isinstance(policy, PlannedBlockPolicy), "of a model in blocks"
    decoded = cfg.rollout.micro_batch_size_per_gpu or block_diffusion_sft.DECODED_TOGETHER
    rollout = PlannedBlockRollout(policy, cfg.rollout, policy.world, decoded, None)
    prompt, response, noise = cfg.data.max_prompt_length, cfg.data.max_response_length, cfg.block_diffusion
    most_noised = replace(cfg, block_diffusion=replace(noise, noise_range_low=noise.noise_range_high))
    flops = policy.states_flops(prompt + response, response / policy.size, response * noise.noise_range_high)
    with policy.ledger, policy.ledger.uncounted():
        examples = [block_diffusion_sft.Example([0] * prompt, [0] * response)] * cfg.data.batch_size(cluster.ranks)
        task = PlannedBlockDiffusion(most_noised, policy, examples, policy.world)
        return SupervisedRehearsal(cfg, policy, rollout, task, noise.ema, round(flops))


class _Engine(PolicyRollout):
    """The part of a rollout beside a sampling engine that needs none of the policy's modules."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        with torch.no_grad():
            yield


def _teacher(teacher: Teacher, cfg: FlowRLConfig, student: PlannedFlowPolicy, micro: int) -> LoadedFlowTeacher:
    """As load_teacher; text encoders with the same shapes count as equal."""
    with reported_by({"model": taught_model(teacher, cfg.model)}):
        folder = fetch(teacher.path, teacher.revision)
        kind = read_index(Path(folder))["_class_name"]
    check_kind(teacher, kind, read_index(Path(cfg.model.path))["_class_name"])

    def build(model: FlowModelConfig, *args: Any, **options: Any) -> PlannedFlowPolicy:
        taught, rank = replace(cfg, model=model), student.world.data_rank
        return planned_policy(taught, student.layout.cluster, student.ledger, rank=rank, frozen=True)

    local = replace(teacher, path=folder, revision=None)
    return load_teacher(local, cfg, student, student.world, micro, build)


def _prompts(policy: AnyPlannedPolicy, count: int, columns: Sequence[str] = ()) -> list[Prompt]:
    """Prompts, with an image in each of these columns and in that of an editing model."""
    images = dict.fromkeys([*columns, *policy.image_columns], _Picture())
    return [Prompt(f"prompt {i}", i, images) for i in range(count)]


class _Picture:
    """An image of the data, without pixels."""

    def pixels(self, height: int, width: int) -> Tensor:
        """An image [3, H, W] on the host, where it takes no memory."""
        return torch.empty(3, height, width, device=META).cpu()


@dataclass(frozen=True)
class _Images:
    """Images of flow matching's data, with a prompt each."""

    cfg: FlowRunConfig
    ranks: int

    def __len__(self) -> int:
        return self.cfg.data.batch_size(self.ranks) * flow_matching.ENCODED_TOGETHER

    def image(self, i: int) -> Tensor:
        return _Picture().pixels(self.cfg.rollout.height, self.cfg.rollout.width)

    def prompt(self, i: int) -> str:
        return f"prompt {i}"


_TASKS: dict[type, Task] = {
    FlowRLConfig: Task("images", "actor", flow_rl.check, _flow, flow_rl.plan),
    FlowMatchingTaskConfig: Task("images", "flow_matching", flow_matching.check, _flow_matching),
    LMRLConfig: Task("responses", "actor", partial(lm_rl.check, installed=False), _lm, lm_rl.plan),
    BlockDiffusionTaskConfig: Task("samples", "block_diffusion", block_diffusion_sft.check, _block_diffusion),
}
