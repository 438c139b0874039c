"""A job on a cluster as --plan sees it: its parts on the meta device, and what they took in a training step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor, nn

from phalanx import algorithms
from phalanx.config.flow import FlowRLConfig, FlowRunConfig
from phalanx.data.prompts import PromptRow, PromptStream
from phalanx.distributed import mesh
from phalanx.distributed.mesh import World
from phalanx.models.flow.folder import read_index
from phalanx.plan.blueprint import PlannedPolicy, fetch, planned_policy
from phalanx.plan.layout import Cluster, Layout
from phalanx.plan.ledger import META, Ledger, Phase, fused_attention, nbytes
from phalanx.plan.rehearsal import FlowMatchingRehearsal, Rehearsal, RLRehearsal
from phalanx.rollout.flow.dataset import PAIR, DatasetRollout
from phalanx.rollout.flow.in_policy import PolicyRollout
from phalanx.training import flow_rl
from phalanx.training.batches import BatchPlan
from phalanx.training.flow_matching import ENCODED_TOGETHER
from phalanx.training.flow_parts import FlowParts
from phalanx.training.teacher import LoadedFlowTeacher, about, check_kind, teacher_model, teacher_rollout
from phalanx.types import Prompt, Teacher


@dataclass(frozen=True)
class PlannedTeacher:
    """A frozen model beside the policy, whose VAE is the policy's."""

    name: str
    loaded: LoadedFlowTeacher
    layout: Layout

    @property
    def encoders(self) -> int:
        """Bytes of its text encoders."""
        return nbytes(tensors(self.loaded.policy.model.text_encoders))

    @property
    def own_encoders(self) -> int:
        """Bytes of them that the policy does not have too."""
        shared = self.loaded.policy.model.text_encoders is self.loaded.student.model.text_encoders
        return 0 if shared else self.encoders


@dataclass(frozen=True)
class Planned:
    """A job on a cluster: what a rank of it holds, and what the phases of a training step took.

    `plan` is None where the job is not one of reinforcement learning. `flops` are those of a step on all ranks.
    """

    cfg: FlowRunConfig
    cluster: Cluster
    plan: BatchPlan | None
    policy: PlannedPolicy
    layout: Layout
    teachers: list[PlannedTeacher]
    job: Rehearsal
    phases: dict[str, Phase]
    flops: int

    @property
    def length(self) -> int:
        """The most tokens of a text."""
        c = self.cfg
        return self.policy.model.most_tokens(c.data.max_prompt_length, c.rollout.height, c.rollout.width)


def planned(cfg: FlowRunConfig, cluster: Cluster) -> Planned:
    """The job on a cluster that it can run on; seconds. Raises ValueError for a model folder that cannot be read."""
    rl = cfg if isinstance(cfg, FlowRLConfig) else None
    plan = flow_rl.plan(rl, cluster.ranks) if rl is not None else None
    ledger, world = Ledger(), _world(cfg, cluster, plan)
    policy = planned_policy(cfg, world, ledger, detach_uncond=rl is not None and rl.actor.detach_uncond)
    layout = Layout.of(policy, cfg.parallel, cluster.ranks, width_of(cfg, cluster))
    rollout = _rollout(cfg, policy, plan)
    parts, rows = FlowParts(world, None, policy, rollout, {}), _rows(policy, cfg.data.train_batch_size)
    algorithm = algorithms.build(rl.algorithm) if rl is not None else None
    teachers = (
        [_teacher(t, cfg, policy, rollout.micro_batch_size, cluster) for t in algorithm.teachers] if algorithm else []
    )
    job: RLRehearsal | FlowMatchingRehearsal
    with mesh.alone(), fused_attention(), ledger:
        with ledger.uncounted():
            if algorithm is not None:
                stream = PromptStream(rows, len(rows), cfg.data.seed)
                loaded = {teacher.name: teacher.loaded for teacher in teachers}
                job = RLRehearsal(ledger, layout, cfg, plan, algorithm, parts, stream, loaded)
            else:
                job = FlowMatchingRehearsal(ledger, layout, cfg, _Images(cfg), parts)
        if validates(cfg):
            few = _rows(policy, -(-rollout.micro_batch_size // cfg.rollout.val.n))
            job.run_validation([Prompt(row.text, i, row.meta) for i, row in enumerate(few)])
        job.run_step()
    return Planned(cfg, cluster, plan, policy, layout, teachers, job, ledger.phases, job.flops())


def width_of(cfg: FlowRunConfig, cluster: Cluster) -> int:
    """Ranks that share a copy of the weights."""
    return mesh.shard_size(cfg.parallel, mesh.Launch(0, cluster.ranks, 0, cluster.per_node))


def validates(cfg: FlowRunConfig) -> bool:
    """Whether there is a validation at all."""
    due = cfg.trainer.test_freq > 0 or cfg.trainer.val_before_train
    return due and bool(cfg.data.val_files and cfg.reward.functions)


def tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers."""
    return [t for module in modules for t in (*module.parameters(), *module.buffers())]


def _world(cfg: FlowRunConfig, cluster: Cluster, plan: BatchPlan | None) -> World:
    """That of a rank that holds all weights and has as many prompts as any."""
    rank = 0
    if plan is not None:
        share, n = plan.per_rank, cfg.rollout.n
        rank = max(range(cluster.ranks), key=lambda r: ((r + 1) * share - 1) // n - r * share // n)
    return cast(World, SimpleNamespace(rank=rank, size=cluster.ranks, shard_size=1, device=META, watch=None))


def _rollout(cfg: FlowRunConfig, policy: PlannedPolicy, plan: BatchPlan | None) -> PolicyRollout:
    """The rollout, with the window where it ends last."""
    c = cfg.rollout
    if plan is None:
        return PolicyRollout(policy, c, policy.world, c.micro_batch_size_per_gpu or 16)
    if not plan.forward:
        assert isinstance(cfg, FlowRLConfig)
        end = c.num_inference_steps - 1 if c.sde_window_range is None else c.sde_window_range[1]
        c = replace(c, sde_window_range=[end - flow_rl.stochastic_steps(cfg), end])
    kind = {"policy": PolicyRollout, "dataset": DatasetRollout, "vllm_omni": _Engine}[c.engine]
    return kind(policy, c, policy.world, plan.rollout_micro, window=not plan.forward)


class _Engine(PolicyRollout):
    """What a sampling engine with weights of its own leaves to count."""

    exact = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        with torch.no_grad():
            yield


def _teacher(
    teacher: Teacher, cfg: FlowRunConfig, student: PlannedPolicy, micro: int, cluster: Cluster
) -> PlannedTeacher:
    """As phalanx.training.teacher.load_teacher, but that text encoders of equal shapes are taken for equal."""
    with about(teacher):
        folder = fetch(teacher.path)
        kind = read_index(Path(folder))["_class_name"]
    check_kind(teacher, kind, read_index(Path(cfg.model.path))["_class_name"])
    own = replace(cfg, model=teacher_model(cfg.model, folder))
    with about(teacher):
        policy = planned_policy(own, student.world, student.ledger, detach_uncond=False, frozen=True)
    ours, theirs = ([t.shape for t in tensors(p.model.text_encoders)] for p in (student, policy))
    policy.share(student, text=ours == theirs)
    rollout = PolicyRollout(policy, teacher_rollout(cfg.rollout, teacher, policy.model), student.world, micro)
    layout = Layout.of(policy, cfg.parallel, cluster.ranks, width_of(cfg, cluster))
    return PlannedTeacher(teacher.name, LoadedFlowTeacher(student, policy, rollout), layout)


def _rows(policy: PlannedPolicy, count: int) -> list[PromptRow]:
    """Prompts, with all images that a job could look for beside them."""
    column = policy.model.image_column
    columns = [*PAIR, *([] if column is None else [column])]
    return [PromptRow(f"prompt {i}", None, dict.fromkeys(columns, _Picture())) for i in range(count)]


class _Picture:
    """An image of the data, which is not looked at."""

    def pixels(self, height: int, width: int) -> Tensor:
        """On the host, where they take no memory."""
        return torch.empty(3, height, width, device=META).cpu()


@dataclass(frozen=True)
class _Images:
    """Images of flow matching's data, with a prompt each."""

    cfg: FlowRunConfig

    def __len__(self) -> int:
        return self.cfg.data.train_batch_size * ENCODED_TOGETHER

    def image(self, i: int) -> Tensor:
        return _Picture().pixels(self.cfg.rollout.height, self.cfg.rollout.width)

    def prompt(self, i: int) -> str:
        return f"prompt {i}"
