"""The tasks that are planned, and what distinguishes them for a plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from phalanx.config.block_diffusion import BlockDiffusionTaskConfig
from phalanx.config.flow import FlowMatchingTaskConfig, FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.config.run import RunConfig
from phalanx.training import block_diffusion, flow_matching, flow_rl, lm_rl
from phalanx.training.minibatches import BatchPlan

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """`samples`: the noun for what the task samples or learns from, in the plural. `section`: the section of the
    configuration with the sizes of an update. `untimed`: the work that no time of the plan contains.

    `check(cfg, launch)` raises ConfigError for what the ranks of a launch cannot run. `plan(cfg, ranks)` is the
    arithmetic of a step of reinforcement learning; None: the task is supervised.
    """

    samples: str
    section: str
    untimed: str
    check: Callable[..., object]
    plan: Callable[[Any, int], BatchPlan] | None = None


_IMAGES = "rewards, validation, checkpoints, text encoders, VAE, waiting for the slowest rank"
_TEXTS = "validation, checkpoints, the slowest rank"
_DECODING = "that decoding waits for memory, rewards, validation, checkpoints, the slowest rank"
_TASKS: dict[type, Task] = {
    FlowRLConfig: Task("images", "actor", _IMAGES, flow_rl.check, flow_rl.plan),
    FlowMatchingTaskConfig: Task("images", "flow_matching", _IMAGES, flow_matching.check),
    LMRLConfig: Task("responses", "actor", _DECODING, partial(lm_rl.check, installed=False), lm_rl.plan),
    BlockDiffusionTaskConfig: Task("samples", "block_diffusion", _TEXTS, block_diffusion.check),
}


def by_task(table: Mapping[type, T], cfg: RunConfig) -> T:
    """The entry of a configuration's class, or of the first of its bases that has one."""
    return next(table[kind] for kind in type(cfg).__mro__ if kind in table)


def task_of(cfg: RunConfig) -> Task:
    """The task that a configuration is of."""
    return by_task(_TASKS, cfg)
