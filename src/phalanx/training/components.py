"""The components that a kind of policy brings to a job, behind what the loop asks of them."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.config.lm import LMDataConfig
from phalanx.config.load import ConfigError
from phalanx.config.run import RLConfig, RunConfig
from phalanx.data.prompts import PromptRow, numbered
from phalanx.distributed import mesh
from phalanx.distributed.collectives import broadcast_object
from phalanx.distributed.launch import Launch
from phalanx.distributed.mesh import World
from phalanx.distributed.placement import judged_beside
from phalanx.distributed.roles import ACTOR
from phalanx.models.linear import preferred
from phalanx.models.trained import TrainedModel
from phalanx.rewards import RewardSet
from phalanx.training import folder_lock
from phalanx.training.checkpoint import saved_choice
from phalanx.types import KeepsSamples, Policy, Prompt, Rollout, Samples, Teacher

log = logging.getLogger(__name__)


class TrainedPolicy(Policy, Protocol):
    """The policy as the loop sees it. `trained` holds its weights."""

    @property
    def trained(self) -> TrainedModel: ...

    def step_flops(
        self, samples: Samples, *, actions: int, count: int, updates: float, references: float, recomputed: bool
    ) -> int:
        """Floating-point operations of a training step of `count` samples like these, in which
        `actions` of each are trained `updates` times and seen `references` times by other weights;
        `recomputed`: with what backward passes compute again to save memory.
        """


class LoadedTeacher(Protocol):
    """A frozen model beside the policy, on all ranks."""

    @property
    def policy(self) -> Policy: ...

    def samples(self, samples: Samples) -> Samples:
        """The policy's samples as the teacher would have sampled them."""

    def relative_cost(self, samples: Samples) -> float:
        """Operations of its view of a sample over those of the policy's own."""


class Critic(Protocol):
    """A model beside the policy that is trained to predict the return. `trained` holds its weights."""

    @property
    def trained(self) -> TrainedModel: ...

    def values(self, trace: Any) -> Tensor:
        """[B, A] float32 of a Trace: the reward that is still to come before each action, with a gradient."""


@dataclass(frozen=True)
class JobComponents:
    """All that a kind of policy brings to a job.

    `rollout` and `rewards` are None if other ranks sample; `exact` and `noun` are the rollout's, wherever it is (see
    phalanx.types.Rollout). `val_sets` are the held-out prompts by name. `keeps` is the rollout where some of its
    samples wait for later steps.
    """

    world: World
    rewards: RewardSet | None
    policy: TrainedPolicy
    rollout: Rollout | None
    val_sets: dict[str, list[Prompt]]
    exact: bool = True
    noun: str = "samples"
    keeps: KeepsSamples | None = None


def start(cfg: RunConfig, part: str = "") -> World:
    """Join the world, as deterministic as trainer.deterministic asks, and take the output folder for this job. `part`:
    of the policy whose configuration it is, where the job has several.

    Raises ValueError if another job has it.
    """
    if cfg.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    ranks = Launch.from_env().world_size
    if ranks > 1:
        log.info("joining %d ranks", ranks)
    world = mesh.start(cfg.parallel, cfg.placement if isinstance(cfg, RLConfig) else None)
    if world.role == ACTOR:
        folder_lock.hold(Path(cfg.trainer.output_dir), world)
    if world.device.type == "cpu":
        choose_cpu_linear(cfg, world, part)
    data = cfg.data
    if isinstance(data, LMDataConfig):
        given, name = data.chat_template_date, "chat_template_date"
        data.chat_template_date = choose_once(cfg, world, name, given, lambda: date.today().isoformat())
    return world


def choose_cpu_linear(cfg: RunConfig, world: World, part: str = "") -> None:
    """Set model.cpu_linear where it is null: hosts may differ, and libraries in last bits. `part`: see `start`."""
    name = f"{part}: cpu_linear" if part else "cpu_linear"
    choice = cfg.model.cpu_linear = choose_once(cfg, world, name, cfg.model.cpu_linear, preferred)
    if world.lead:
        log.debug("float32 linear layers by %s (model.cpu_linear)", choice)


def choose_once(cfg: RunConfig, world: World, name: str, given: str | None, choose: Callable[[], str]) -> str | None:
    """A choice that a run makes once: as given, as the checkpoint has it that is resumed, or anew by rank 0."""
    if given is None:
        if world.rank == 0:
            root = Path(cfg.trainer.output_dir) / "checkpoints"
            given = saved_choice(root, cfg.trainer.resume, name) or choose()
        given = broadcast_object(given)
    return given


def build_rewards(
    cfg: RunConfig,
    world: World,
    rows: Sequence[PromptRow] = (),
    val_sets: Mapping[str, list[Prompt]] = MappingProxyType({}),
    *,
    outputs: str = "images",
    gradients: bool = False,
) -> RewardSet | None:
    """The rewards of this rank, None if the configuration has none, or other ranks sample. `outputs`: what the job
    makes, "images" (or videos) or "completions". They are asked about all rows whose samples they are to score: `rows`
    are trained on. `gradients`: the algorithm differentiates the rewards. Raises ConfigError for what they cannot do.
    """
    if not cfg.reward.functions or not world.samples:
        return None
    # where ranks share the scoring of a sample they do not submit equally often
    beside = judged_beside(cfg, world.shard_size) and world.context_size == 1
    rewards = RewardSet(
        cfg.reward,
        str(world.device),
        cfg.parallel.timeout_s,
        outputs=outputs,
        beside=beside,
        launch=world.launch,
        context_size=world.context_size,
    )
    if gradients:
        rewards.check_gradients()
    rewards.check_rows(rows, first=world.rank == 0)
    for held_out in val_sets.values():
        rewards.check_rows(held_out, first=world.rank == 0)
    return rewards


@contextmanager
def about(teacher: Teacher) -> Iterator[None]:
    """Messages about model.path within the block (ValueError) name the teacher's key instead."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{teacher.key}: {str(error).removeprefix('model.path: ')}") from error


def routed(rows: list[PromptRow], teachers: Sequence[Teacher], *, first: bool) -> list[PromptRow]:
    """The rows, each with the teacher that it names, where the teachers are for rows of their own. Raises ConfigError
    for a row that names none; the rank that is `first` warns of a teacher that no row names.
    """
    names = {teacher.rows[1]: teacher.name for teacher in teachers if teacher.rows is not None}
    if not names:
        return rows
    column = next(teacher.rows[0] for teacher in teachers if teacher.rows is not None)
    result = []
    for row in rows:
        value = row.meta.get(column)
        if str(value) not in names:
            given = f"{column} is {value!r}" if column in row.meta else f"it has no column {column!r}"
            raise ConfigError(
                f"{row.place}: {given}; expected one of algorithm.teachers, {', '.join(names)} (algorithm.teacher_key)"
            )
        result.append(replace(row, teacher=names[str(value)]))
    asked = {row.teacher for row in result}
    for teacher in teachers:
        if first and teacher.name not in asked:
            log.warning("%s: no row of data.train_files has it in column %s; it is never asked", teacher.key, column)
    return result


def fitting_sets(
    sets: dict[str, list[Prompt]], fitting: Callable[[list[PromptRow], str], list[PromptRow]]
) -> dict[str, list[Prompt]]:
    """The prompts of each validation set that `fitting(rows, key)` keeps, where `key` names the set in messages."""
    kept = {}
    for name, prompts in sets.items():
        rows = [PromptRow(p.text, p.negative, p.meta, p.messages, p.place, p.images) for p in prompts]
        kept[name] = [numbered(row, i) for i, row in enumerate(fitting(rows, f"data.val_files ({name})"))]
    return kept
