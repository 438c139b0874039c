"""The base classes of algorithms: advantages within groups and the samples to train on; the losses of tokens and of
sampled transitions, each a surrogate of the likelihood ratio and a KL penalty.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor

from phalanx.config.choices import STDS
from phalanx.config.fields import arg
from phalanx.config.run import AlgorithmConfig
from phalanx.functional.advantage import group_advantage, has_signal, top_and_bottom
from phalanx.functional.aggregation import ratio_metrics
from phalanx.functional.flow import FlowBatch, FlowReplay, FlowTrace
from phalanx.functional.losses import KL_LOSS_TYPES, kl_estimate, noise_weight
from phalanx.functional.sde import gaussian_kl
from phalanx.functional.tokens import TokenReplay, TokenTrace
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


@dataclass
class TokenConfig(GroupConfig):
    """The configuration shared by all algorithms on tokens."""

    kl_loss_coef: float = arg(0.0, "beta: weight of the KL to the reference; 0 runs no reference at all", ge=0)
    kl_loss_type: str = arg(
        "k3",
        "estimate of that KL at each token (Schulman); k3+: the value of k3 with the gradient of k2, "
        "both unbiased; the expected gradient of k1 is 0",
        choices=KL_LOSS_TYPES,
    )
    entropy_coeff: float = arg(0.0, "weight of the entropy, which is maximised", ge=0)
    early_stop_imp_ratio: Optional[float] = arg(
        None,
        "skip the rest of a step's updates, starting with the first later update whose tokens have a "
        "mean ratio above this; 5 in RLinf; null: never",
        gt=1,
    )


class TokenAlgorithm(GroupAlgorithm, ABC):
    """loss = surrogate + beta KL(pi, pi_ref) - entropy_coeff H, for each token."""

    config: TokenConfig
    corrects = True

    def __init__(self, config: TokenConfig) -> None:
        super().__init__(config)
        self.max_ratio = config.early_stop_imp_ratio

    @abstractmethod
    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The surrogate term of the loss [B, A], and metrics."""

    def reference_output(self, policy: Policy, batch: Batch[TokenTrace]) -> Tensor:
        """The log-probabilities [B, A] of the same tokens under other weights."""
        replay: TokenReplay = policy.replay(batch.trace)
        return replay.log_prob

    def loss(self, policy: Policy, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The loss [B, A] per token, before its weight, and metrics."""
        replay: TokenReplay = policy.replay(batch.trace)
        if batch.on_policy:
            batch = replace(batch, log_prob=replay.log_prob.detach())
        loss, stats = self.surrogate(replay, batch)
        if batch.correction is not None:  # only the surrogate: rejected tokens keep their KL and entropy terms
            loss = loss * batch.correction
        if "ratio_error" not in stats:  # the surrogate uses no ratio
            stats["ratio_error"] = ratio_metrics(replay.log_prob - batch.log_prob)["ratio_error"]
        stats |= {"entropy": replay.entropy, "self_certainty": replay.self_certainty}
        return self.regularize(loss, replay, batch, stats), stats

    def regularize(self, loss: Tensor, replay: TokenReplay, batch: Batch[TokenTrace], stats: Metrics) -> Tensor:
        """Add the terms that rollout.correction does not weight: the entropy bonus and the KL."""
        if self.config.entropy_coeff > 0:
            loss = loss - self.config.entropy_coeff * replay.entropy
        if "reference" in batch.reference_outputs:
            other = batch.reference_outputs["reference"]
            kl = kl_estimate(replay.log_prob, other, self.config.kl_loss_type)
            if self.config.kl_loss_coef > 0:  # otherwise the reference is only used for a KL in the reward
                loss = loss + self.config.kl_loss_coef * kl
            stats["kl_ref"] = kl
        return loss


@dataclass
class TransitionConfig(GroupConfig):
    """The configuration shared by all algorithms on transitions."""

    kl_loss_coef: float = arg(0.0, "beta: weight of the KL to the reference; 0 runs no reference at all", ge=0)
    kl_convention: str = arg(
        "exact", "exact Gaussian KL, or divided as flow_grpo's code does", choices=("exact", "flow_grpo")
    )
    importance: str = arg(
        "step",
        "one likelihood ratio per step, or per sample from the mean of its steps' log-ratios (GSPO)",
        choices=("step", "sequence"),
    )
    timestep_weight: str = arg(
        "none",
        "noise: the surrogate of each step is weighted by the std of its transition (TempFlow-GRPO); the"
        " weights' mean over all steps that a window may contain is 1",
        choices=("none", "noise"),
    )


class TransitionAlgorithm(GroupAlgorithm, ABC):
    """loss = surrogate + beta KL(pi, pi_ref), for each sample and trained step."""

    clip_range = 1e-4
    corrects = True

    @abstractmethod
    def surrogate(self, replay: FlowReplay, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The surrogate term of the loss [B, W], and metrics."""

    def reference_output(self, policy: Policy, batch: FlowBatch) -> Tensor:
        """The means [B, W, ...] of the same transitions under other weights."""
        replay: FlowReplay = policy.replay(batch.trace)
        return replay.mean

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [B, W] per sample and trained step, before its weight, and metrics."""
        replay: FlowReplay = policy.replay(batch.trace)
        loss, stats = self.surrogate(replay, batch)
        if batch.correction is not None:  # only the surrogate: rejected steps keep their KL term
            loss = loss * batch.correction
        if self.config.timestep_weight == "noise":
            loss = loss * noise_weight(replay.std, batch.trace.typical_std)
        if "reference" in batch.reference_outputs:
            kl = divergence(replay.mean, batch.reference_outputs["reference"], self._kl_std(replay.std, batch.trace))
            loss = loss + self.config.kl_loss_coef * kl
            stats["kl_ref"] = kl
        return loss, stats

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Values [B, W] of each step; with importance=sequence, their mean over a sample's steps at each of them."""
        if self.config.importance == "step":
            return values
        return values.mean(1, keepdim=True).expand_as(values)

    def _kl_std(self, std: Tensor, trace: FlowTrace) -> Tensor:
        """[W] the std in the KL: that of the transitions, or of `sde` without the factor sqrt(-delta) (flow_grpo)."""
        if self.config.kl_convention == "flow_grpo" and trace.sampler.sde_type == "sde":
            return std / torch.sqrt(-trace.delta)
        return std


def divergence(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """KL [B, W] of Gaussian transitions with means [B, W, ...] and one std [W] for all samples."""
    b, w = mean.shape[:2]
    return gaussian_kl(mean.flatten(0, 1), other_mean.flatten(0, 1), std.repeat(b)).view(b, w)
