"""A planned job on a cluster: its parts on the meta device, after a training step that a ledger counted."""

from dataclasses import replace
from typing import Any

from phalanx.config.joint import WRITER, JointConfig, frozen
from phalanx.config.registry import resolve_object
from phalanx.config.reward import RewardModelConfig
from phalanx.config.run import RLConfig, RunConfig
from phalanx.config.section import reported_by
from phalanx.distributed import mesh
from phalanx.distributed.mesh import ACTOR, INFERENCE, ROLLOUT
from phalanx.run.disaggregated.role_batches import of_role
from phalanx.run.kind import kind_of
from phalanx.run.roles import Roles, roles_of
from phalanx.tools.plan.blueprint import family_name, fetch
from phalanx.tools.plan.layout import Cluster
from phalanx.tools.plan.ledger import fused_attention
from phalanx.tools.plan.rehearsal import Rehearsal, longest_prompts
from phalanx.training.minibatches import BatchPlan


def policies_of(cfg: RunConfig | JointConfig) -> dict[str, RunConfig]:
    """The configuration of each policy of a joint run by its name; of another job, the configuration itself by ""."""
    return {name: kind.cfg for name, kind in kind_of(cfg).parts().items()}


def locate(cfg: RunConfig | JointConfig) -> None:
    """Have the configuration name local folders of its models, and the families of flow models."""
    for part in policies_of(cfg).values():
        with reported_by(vars(part)):
            part.model.path = fetch(part.model.path, part.model.revision)
            model: Any = part.model
            if "family" in vars(model):
                model.family = family_name(model)


def roles_on(cfg: RunConfig, c: Cluster) -> Roles:
    """The roles of a cluster's ranks; ConfigError if the placement does not fit it."""
    return roles_of(vars(cfg).get("placement", {}), c.launch)


def parts_of(cfg: Any, cluster: Cluster) -> list[Rehearsal]:
    """The parts of a job that are planned one by one: policies of a joint run, ranks of each role, or the whole job."""
    policies = policies_of(cfg)
    if "" not in policies:
        return planned_joint(cfg, cluster)
    roles = roles_on(policies[""], cluster)
    if roles.collocated:
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
    kind = kind_of(cfg)
    if plan is None:
        plan = kind.plan(cfg.parallel.data_ranks(cluster.ranks))
    rehearsed = resolve_object(kind.planner, f"kind={cfg.kind}", "function")
    with mesh.alone(cfg.parallel.ulysses_sequence_parallel_size), fused_attention():
        job: Rehearsal = rehearsed(kind, cluster, plan, teaches=role in ("", ACTOR) and not part, learns=learns)
        job.kind, job.role, job.part, job.rescores = kind, role, part, rescores and learns
        due = cfg.trainer.test_freq > 0 or cfg.trainer.val_before_train
        with job.ledger:
            if due and cfg.data.val_files and cfg.reward.functions and role in ("", ROLLOUT):
                few = -(-job.rollout.micro_batch_size // cfg.rollout.val.n)
                job.run_validation(longest_prompts(job.policy, few))
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
    launch = roles.launch(role, cluster.launch)
    plan = kind_of(cfg).plan(
        cfg.parallel.data_ranks(len(roles.ranks[ACTOR]))
    )  # the actor's is of the whole step, those of others of a part
    if role != ACTOR:
        plan = of_role(plan, cfg, roles, role)
    width, node = mesh.role_width(cfg.parallel, launch, role), launch.local_world_size
    cfg = replace(cfg, parallel=replace(mesh.parallel_of(cfg.parallel, role), fsdp_size=width))
    smaller = replace(cluster, nodes=launch.world_size // node, per_node=node)
    rescores = role == (INFERENCE if INFERENCE in roles.ranks else ACTOR)
    return planned(cfg, smaller, plan=plan, role=role, rescores=rescores)
