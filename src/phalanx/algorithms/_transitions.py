"""The base class of algorithms on sampled transitions: a surrogate of the likelihood ratio, and a KL penalty."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.algorithms._group import GroupAlgorithm, GroupConfig
from phalanx.config.fields import arg
from phalanx.functional.flow import FlowBatch, FlowReplay, FlowTrace
from phalanx.functional.losses import noise_weight
from phalanx.functional.sde import gaussian_kl
from phalanx.types import Metrics, Policy


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
