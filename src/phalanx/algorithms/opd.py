"""On-policy distillation: a student learns from a frozen teacher at the states that the student itself visits
(DiffusionOPD, https://arxiv.org/abs/2605.15055; for language models https://arxiv.org/abs/2306.13649).

    kl:        L = mean over samples and trained steps of  mean (mu - mu_T)^2 / 2 sigma_q^2
    velocity:  L = mean over samples and trained steps of  mean (v - v_T)^2

mu is the mean of the student's stochastic step, of standard deviation sigma_q, from a state of its own trajectory, and
mu_T that of the teacher's from the same state. The KL of the two Gaussians is exact; no reward takes part in it.

With `teacher_guidance` a guided teacher teaches a student that samples without guidance.

Deviations from the paper:
1. There is one teacher, for all prompts.
2. Only the steps of the rollout's window are stochastic and trained, where rollout.sde_window_size says so.
3. `velocity` is an addition: it has the same states, with equal weights at all noise levels.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from phalanx.algorithms._group import GroupAlgorithm
from phalanx.config.load import arg
from phalanx.config.run import AlgorithmConfig
from phalanx.functional.flow import FlowBatch, FlowReplay
from phalanx.functional.sde import gaussian_kl
from phalanx.types import Policy, Teacher

TEACHER = "teacher"


@dataclass
class Config(AlgorithmConfig):
    """Keys of `algorithm` where its name is opd."""

    teacher_path: str = arg("???", "the teacher: a diffusers folder (or hub id) of the model's family", path=True)
    teacher_revision: Optional[str] = arg(None, "commit, tag or branch of the teacher's hub id; null: its main branch")
    teacher_guidance: Optional[float] = arg(
        None, "classifier-free guidance of the teacher, 1 is off; null: as in the rollout", ge=1
    )
    loss_type: str = arg(
        "kl",
        "KL divergence of the transitions, or mean square of the velocities' difference",
        choices=("kl", "velocity"),
    )


class Algorithm(GroupAlgorithm):
    """See phalanx.types.Algorithm. All samples count, whatever their rewards."""

    config: Config
    needs_reward = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.references = (TEACHER,)
        key, guidance = "algorithm.teacher_path", config.teacher_guidance
        self.teachers = (Teacher(TEACHER, config.teacher_path, key, guidance, config.teacher_revision),)

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] zeros: rewards are only reported."""
        return torch.zeros(len(reward))

    def sample_mask(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] bool: all."""
        return torch.ones(len(reward), dtype=torch.bool)

    def reference_output(self, policy: Policy, batch: FlowBatch) -> Tensor:
        """The teacher's means or velocities [B, W, ...] of the same transitions."""
        return self._prediction(policy.replay(batch.trace))

    def loss(self, policy: Policy, batch: FlowBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [B, W] per sample and trained step, before its weight, and detached scalars."""
        replay: FlowReplay = policy.replay(batch.trace)
        teacher = batch.reference_outputs[TEACHER]
        student = self._prediction(replay)
        if self.config.loss_type == "kl":
            loss = gaussian_kl(student.flatten(0, 1), teacher.flatten(0, 1), replay.std.repeat(len(student)))
        else:
            loss = torch.square(student - teacher).flatten(2).mean(2)
        loss = loss.view(student.shape[:2])
        return loss, {f"teacher_{self.config.loss_type}": loss.detach().mean()}

    def _prediction(self, replay: FlowReplay) -> Tensor:
        return replay.mean if self.config.loss_type == "kl" else replay.velocity
