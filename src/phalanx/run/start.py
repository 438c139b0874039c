"""The start of a job, whatever its kind of policy: the world, choices that last, rewards and rows."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from phalanx.config.messages import ConfigError
from phalanx.config.run import RunConfig
from phalanx.distributed.collectives import from_first
from phalanx.distributed.launch_env import Launch
from phalanx.distributed.mesh import ACTOR, World
from phalanx.distributed.placement import judged_beside
from phalanx.models.linear import preferred
from phalanx.models.meeting import here, shared
from phalanx.rewards.runner import RewardSet
from phalanx.run import folder_lock, in_place
from phalanx.run.checkpoint_folder import saved_choice
from phalanx.run.devices import check_dtype
from phalanx.run.world import start_world, world_of_run
from phalanx.training.components import Tell, TrainedPolicy
from phalanx.types import Prompt, Rollout, Teacher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobComponents:
    """The components that a kind of policy provides to a job.

    rollout and rewards: None if other ranks sample. exact and noun: those of the rollout, on whichever ranks it is (see
    phalanx.types.Rollout). val_sets: held-out prompts by name. tell: see phalanx.training.collect.Collector.
    """

    world: World
    rewards: RewardSet | None
    policy: TrainedPolicy
    rollout: Rollout | None
    val_sets: dict[str, list[Prompt]]
    exact: bool = True
    noun: str = "samples"
    tell: Tell | None = None


def start_job(cfg: RunConfig, part: str = "") -> World:
    """Set up determinism (trainer.deterministic), join the process groups, and lock the output folder for this job.

    part: name of the policy that `cfg` configures, if the job has several. Raises ValueError if another job uses the
    folder.
    """
    if cfg.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts, which reads it then
        torch.use_deterministic_algorithms(True)
    ranks = Launch.from_env().world_size
    if ranks > 1:
        log.info("joining %d ranks", ranks)
    world = shared("world", partial(start_world, cfg.parallel, vars(cfg).get("placement")))
    if here() is not None:
        world = world_of_run(world, cfg.parallel)
    if world.role == ACTOR:
        folder_lock.hold(Path(cfg.trainer.output_dir), world)
    check_dtype(f"{cfg.model:dtype}", cfg.model.dtype, world.device)
    if world.device.type == "cpu":
        choose_cpu_linear(cfg, world, part)
    data, name = vars(cfg.data), "chat_template_date"
    if name in data:
        data[name] = choose_once(cfg, name, data[name], lambda: date.today().isoformat())
    return world


def choose_cpu_linear(cfg: RunConfig, world: World, part: str = "") -> None:
    """Set model.cpu_linear if it is null, equally on all ranks: hosts may prefer different libraries, whose results
    differ in the last bits. `part`: see `start`.
    """
    name = f"{part}: cpu_linear" if part else "cpu_linear"
    choice = cfg.model.cpu_linear = choose_once(cfg, name, cfg.model.cpu_linear, preferred)
    if world.lead:
        log.debug("float32 linear layers by %s (%s)", choice, f"{cfg.model:cpu_linear}")


def choose_once(cfg: RunConfig, name: str, given: str | None, choose: Callable[[], str]) -> str:
    """Return `given`, or else the choice `name` in the checkpoint to resume from, or else what rank 0 chooses."""
    if given is not None:
        return given
    root, resume = Path(cfg.trainer.output_dir) / "checkpoints", cfg.trainer.resume
    return from_first(lambda: in_place.remembered(name, lambda: saved_choice(root, resume, name) or choose()))


def build_rewards(
    cfg: RunConfig,
    world: World,
    rows: Sequence[Prompt] = (),
    val_sets: Mapping[str, list[Prompt]] = MappingProxyType({}),
    *,
    outputs: str = "images",
    gradients: bool = False,
) -> RewardSet | None:
    """Load this rank's reward functions; None if the configuration has none or other ranks sample.

    Raises ConfigError if they cannot score the training rows `rows` or the rows of `val_sets`. outputs: what the job
    samples, "images" (also for videos) or "completions". gradients: the algorithm differentiates the rewards.
    """
    if not cfg.reward.functions or not world.samples:
        return None
    if cfg.reward.model.path is not None:
        check_dtype("reward.model.dtype", cfg.reward.model.dtype, world.device)
    # scoring beside the rollout needs ranks that submit equally often, which context-parallel ranks do not, and one job
    beside = judged_beside(cfg, world.shard_size) and world.context_size == 1 and here() is None
    make = partial(
        RewardSet,
        cfg.reward,
        str(world.device),
        cfg.parallel.timeout_s,
        outputs=outputs,
        beside=beside,
        launch=world.launch,
        context_size=world.context_size,
    )
    rewards = make() if here() is None else shared(f"rewards of {outputs}: {cfg.reward}", make).another()
    if gradients:
        rewards.check_gradients()
    rewards.check_rows(rows, first=world.rank == 0)
    for held_out in val_sets.values():
        rewards.check_rows(held_out, first=world.rank == 0)
    return rewards


def routed(rows: list[Prompt], teachers: Sequence[Teacher], *, first: bool) -> list[Prompt]:
    """Assign to each row the teacher that its algorithm.teacher_key column names, if teachers are chosen by row.

    Raises ConfigError for a row without a known teacher. first: whether this rank warns of teachers without rows.
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
            log.warning("%s: no row of data.train_files names it in column %s; it is not used", teacher.key, column)
    return result


def fitting_sets(
    sets: dict[str, list[Prompt]], fitting: Callable[[list[Prompt], str], list[Prompt]]
) -> dict[str, list[Prompt]]:
    """Keep the prompts of each validation set that `fitting(rows, key)` returns; `key` names the set in messages."""
    kept = {}
    for name, prompts in sets.items():
        rows = fitting(prompts, f"data.val_files ({name})")
        kept[name] = [replace(row, group_id=i) for i, row in enumerate(rows)]
    return kept
