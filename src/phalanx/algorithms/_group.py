"""The common base class of all algorithms: advantages within groups, and the samples to train on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from phalanx.config.choices import STDS
from phalanx.config.fields import arg
from phalanx.config.run import AlgorithmConfig
from phalanx.functional.advantage import group_advantage, has_signal, top_and_bottom
from phalanx.types import ASKED, TEACHER, Batch, Credit, Metric, Metrics, Policy, Samples, Scored, Teacher

# keys that only group-relative advantages use
OF_ADVANTAGES = ("adv_clip_max", "global_std", "norm_adv_by_std_in_grpo", "group_filter", "group_filter_k")


@dataclass
class GroupConfig(AlgorithmConfig):
    """The configuration shared by algorithms with advantages; a subclass lists keys it does not use in `unused`."""

    bounds_stds: ClassVar[bool] = True

    adv_clip_max: float = arg(5.0, "advantages divided by a std are clamped to +- this", only=(STDS,), gt=0)
    global_std: Optional[bool] = arg(
        None, "divide advantages by the std of all rewards, not of the group's; null: only with reward.normalize=gdpo"
    )
    norm_adv_by_std_in_grpo: bool = arg(True, "divide advantages by a std at all; false is Dr.GRPO")
    group_filter: str = arg(
        "all", "train on all samples of a prompt, or only on the best and worst", choices=("all", "top_bottom")
    )
    group_filter_k: int = arg(4, "number of best and of worst samples that group_filter=top_bottom keeps", ge=1)


def teachers_of(config: Any, guidance: float | None = None) -> tuple[Teacher, ...]:
    """The teacher at `teacher_path`, or those of `teachers`, each for the rows that name it in column `teacher_key`."""
    if config.teacher_path is not None:
        key = f"{config:teacher_path}"
        return (Teacher(TEACHER, config.teacher_path, key, guidance, config.teacher_revision),)
    teachers = []
    for name, path in config.teachers.items():
        rows = (config.teacher_key, name)
        teachers.append(Teacher(f"{TEACHER} {name}", path, f"{config:teachers}.{name}", guidance, rows=rows))
    return tuple(teachers)


def of_teachers(teachers: Sequence[Teacher], name: str, divergence: Tensor, batch: Batch) -> Metrics:
    """The metric `name`, the divergence [B, A] from the teachers; with several, also that of each over its samples, and
    the share of these.
    """
    metrics: Metrics = {name: divergence}
    asked = batch.reference_outputs.get(ASKED)
    if asked is None:
        return metrics
    for place, teacher in enumerate(teachers):
        chosen, label = asked == place, teacher.name.removeprefix(f"{TEACHER} ")
        metrics[f"{name}/{label}"] = Metric(divergence, where=chosen[:, None])
        metrics[f"teacher_share/{label}"] = chosen
    return metrics


class GroupAlgorithm:
    """An algorithm that compares the samples of each prompt; see phalanx.types.Algorithm."""

    config: Any
    levels: int | None = None
    last_steps = 0
    behaviour: str | None = None
    references: tuple[str, ...] = ()
    averages: tuple[str, ...] = ()
    teachers: tuple[Teacher, ...] = ()
    samples_per_unit = 1
    needs_reward = True
    trains_all = False  # train on all samples, also if the rewards of a group are equal
    per_action = False
    corrects = False
    clip_range = 0.2
    max_ratio: float | None = None

    def __init__(self, config: Any) -> None:
        self.config = config
        if vars(config).get("kl_loss_coef", 0.0) > 0 and "reference" not in self.references:
            self.references = (*self.references, "reference")

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] advantages of the samples of all ranks, clamped if they are divided by a std."""
        c = self.config
        values = group_advantage(reward, group_id, global_std=bool(c.global_std), normalize=c.norm_adv_by_std_in_grpo)
        # without the std they are in units of the reward, where no fixed bound makes sense
        return values.clamp(-c.adv_clip_max, c.adv_clip_max) if c.norm_adv_by_std_in_grpo else values

    def sample_mask(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] bool: the samples that group_filter keeps of groups whose rewards differ; all samples if `trains_all`."""
        if self.trains_all:
            return torch.ones(len(reward), dtype=torch.bool)
        chosen = has_signal(reward, group_id)
        if self.config.group_filter == "top_bottom":
            chosen &= top_and_bottom(reward, group_id, self.config.group_filter_k)
        return chosen

    def units(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N, 1]: each sample is a unit."""
        return torch.arange(len(reward))[:, None]

    def credit(self, scored: Scored, total: Callable[[Tensor], Tensor]) -> Credit:
        """Only called for algorithms with `per_action`."""
        raise AssertionError("the actions of a sample share its advantage")

    def decay(self, name: str, step: int) -> float:
        """Only called for algorithms with `averages`."""
        raise AssertionError(f"{name} is not an average of this algorithm")

    def corrupt(self, policy: Policy, samples: Samples, seeds: Sequence[int]) -> Any:
        """Only called for algorithms with `levels`."""
        raise AssertionError("this algorithm trains on the sampled actions")

    def reference_output(self, policy: Policy, batch: Batch) -> Tensor:
        """Only called for algorithms with `references`."""
        raise AssertionError("this algorithm has no references")
