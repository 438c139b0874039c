"""On-policy distillation: a student learns from a frozen teacher at the states that the student visits
(DiffusionOPD, https://arxiv.org/abs/2605.15055; for language models https://arxiv.org/abs/2306.13649).

    kl:        L = mean over samples and trained steps of  mean (mu - mu_T)^2 / 2 sigma_q^2
    velocity:  L = mean over samples and trained steps of  mean (v - v_T)^2

mu is the mean of the student's stochastic step, with standard deviation sigma_q, from a state of its own trajectory,
and mu_T the mean of the teacher's step from the same state. The KL of the two Gaussians is exact; rewards are not used.

With `teacher_guidance`, a student that samples without guidance can learn from a guided teacher. With `teachers`, each
prompt has one of several teachers (Flow-OPD, https://arxiv.org/abs/2605.08063). `kl_loss_coef` adds the same loss with
the reference as teacher, which anchors the student.

Deviations from the paper:
1. With rollout.sde_window_size only a window of steps is stochastic and trained.
2. `velocity` is an addition: a loss at the same states with equal weights at all noise levels.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from phalanx.algorithms._bases import GroupAlgorithm, divergence, of_teachers, teachers_of
from phalanx.algorithms._forward import mean_square
from phalanx.config.fields import arg
from phalanx.config.run import AlgorithmConfig
from phalanx.functional.flow import FlowBatch, FlowReplay
from phalanx.types import TEACHER, Metrics, Policy


@dataclass
class LossConfig(AlgorithmConfig):
    """The keys of the loss, whoever the teacher is."""

    teacher_guidance: Optional[float] = arg(
        None, "classifier-free guidance of each teacher, 1 is off; null: as in the rollout", ge=1
    )
    loss_type: str = arg(
        "kl",
        "KL divergence of the transitions, or mean square of the velocities' difference",
        choices=("kl", "velocity"),
    )
    kl_loss_coef: float = arg(0.0, "weight of the same loss to the reference; 0 runs no reference at all", ge=0)


@dataclass
class Config(LossConfig):
    """The configuration of `algorithm.name=opd`."""

    teacher_path: Optional[str] = arg(
        None, "the teacher: a diffusers folder (or hub id) of the model's family", path=True
    )
    teacher_revision: Optional[str] = arg(None, "commit, tag or branch of the teacher's hub id; null: its main branch")
    teachers: dict[str, str] = arg(
        {}, "several teachers by name, instead of teacher_path, each for the rows that name it", path=True
    )
    teacher_key: Optional[str] = arg(None, "column of the data that names each row's teacher, of `teachers`")


class Algorithm(GroupAlgorithm):
    """The learning rule: see phalanx.types.Algorithm. All samples count, whatever their rewards."""

    config: Config
    needs_reward = False
    trains_all = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teachers = teachers_of(config, config.teacher_guidance)
        self.references = (*self.references, *(teacher.name for teacher in self.teachers))

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] zeros: rewards are only logged."""
        return torch.zeros(len(reward))

    def reference_output(self, policy: Policy, batch: FlowBatch) -> Tensor:
        """The means or velocities [B, W, ...] of the same transitions under other weights."""
        return self._student_prediction(policy.replay(batch.trace))

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, Metrics]:
        """The loss [B, W] per sample and trained step, before its weight, and metrics."""
        replay: FlowReplay = policy.replay(batch.trace)
        loss = self._transition_loss(replay, batch.reference_outputs[TEACHER])
        stats = of_teachers(self.teachers, f"teacher_{self.config.loss_type}", loss, batch)
        if "reference" in batch.reference_outputs:
            anchor = self._transition_loss(replay, batch.reference_outputs["reference"])
            loss = loss + self.config.kl_loss_coef * anchor
            stats["kl_ref"] = anchor
        return loss, stats

    def _transition_loss(self, replay: FlowReplay, other: Tensor) -> Tensor:
        """The loss [B, W] of each transition relative to means or velocities [B, W, ...] of other weights."""
        student = self._student_prediction(replay)
        if self.config.loss_type == "velocity":
            return mean_square(student - other)
        return divergence(student, other, replay.std)

    def _student_prediction(self, replay: FlowReplay) -> Tensor:
        return replay.mean if self.config.loss_type == "kl" else replay.velocity
