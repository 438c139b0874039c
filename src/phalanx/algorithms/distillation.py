"""On-policy distillation of language models: a student learns from a frozen teacher on its own responses
(https://arxiv.org/abs/2306.13649; as a policy gradient https://thinkingmachines.ai/blog/on-policy-distillation/).

The teacher computes the log-probability log pi_T of each token that the student sampled. With c =
distillation_loss_coef, `loss_type` chooses how log pi is drawn towards it:

    k1:  A - c (log pi_old - log pi_T) is each token's advantage in grpo's clipped surrogate: the policy gradient of the
         reverse KL of each token
    k2:  grpo's loss + c (log pi - log pi_T)^2 / 2, with the same gradient as k1 in the first update of a step
    k3:  grpo's loss + c (pi_T / pi - 1 - log(pi_T / pi)), whose expected gradient is that of the forward KL
    k1+, k3+:  grpo's loss + the value of k1 or k3, with the gradient of k2

A is the group-relative advantage of the response; it is 0 without rewards or with use_task_rewards=false. With
`teachers`, each prompt has one of several teachers.

Deviation from the papers: the KL is estimated at the sampled tokens and never summed over the vocabulary.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from phalanx.algorithms import grpo
from phalanx.algorithms._bases import of_teachers, teachers_of
from phalanx.config.fields import arg
from phalanx.functional.losses import KL_LOSS_TYPES, kl_estimate, spread
from phalanx.functional.tokens import TokenReplay, TokenTrace
from phalanx.types import TEACHER, Batch, Metrics


@dataclass
class DistilledConfig(grpo.Config):
    """The configuration shared by algorithms that learn from a teacher."""

    loss_type: str = arg(
        "k1",
        "KL to the teacher at each sampled token: in the advantage (k1), or as an estimate in the loss (all others)",
        choices=KL_LOSS_TYPES,
    )
    distillation_loss_coef: float = arg(1.0, "weight of that KL, relative to advantages of rewards", gt=0)
    use_task_rewards: bool = arg(True, "also learn from rewards, if there are any; false only reports them")


@dataclass
class Config(DistilledConfig):
    """The configuration of `algorithm.name=distillation`."""

    teacher_path: Optional[str] = arg(
        None, "the teacher: a folder (or hub id) of a causal LM with the same tokens", path=True
    )
    teacher_revision: Optional[str] = arg(None, "commit, tag or branch of the teacher's hub id; null: its main branch")
    teachers: dict[str, str] = arg(
        {}, "several teachers by name, instead of teacher_path, each for the rows that name it", path=True
    )
    teacher_key: Optional[str] = arg(None, "column of the data that names each row's teacher, of `teachers`")


class Distilled(grpo.Algorithm):
    """Learns from reference_outputs[TEACHER]. All samples count, whatever their rewards."""

    config: DistilledConfig
    needs_reward = False
    trains_all = True

    def advantage(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """[N] group-relative advantages; zeros if task rewards are not used."""
        if not self.config.use_task_rewards:
            return torch.zeros(len(reward))
        return super().advantage(reward, group_id)

    def surrogate(self, replay: TokenReplay, batch: Batch[TokenTrace]) -> tuple[Tensor, Metrics]:
        """The clipped surrogate [B, A], whose advantage includes the KL to the teacher under k1, and its metrics."""
        c, teacher = self.config, self.taught(batch.log_prob, batch)
        advantage = spread(batch.advantage, replay.log_prob)
        if c.loss_type == "k1":
            advantage = advantage - c.distillation_loss_coef * kl_estimate(batch.log_prob, teacher, "k1")
        loss, stats = self.clipped(replay, batch, advantage)
        now = replay.log_prob.detach()
        kl = kl_estimate(now, self.taught(now, batch), "k1")
        return loss, stats | self.divergence(kl, batch)

    def taught(self, student: Tensor, batch: Batch[TokenTrace]) -> Tensor:
        """The teacher's log-probabilities [B, A] of the sampled tokens, beside those of the `student`."""
        return batch.reference_outputs[TEACHER]

    def divergence(self, kl: Tensor, batch: Batch[TokenTrace]) -> Metrics:
        """The metric of the KL [B, A] to the teacher."""
        return of_teachers(self.teachers, "teacher_kl", kl, batch)

    def regularize(self, loss: Tensor, replay: TokenReplay, batch: Batch[TokenTrace], stats: Metrics) -> Tensor:
        """Add the KL to the teacher, except under k1, and the terms of grpo."""
        c = self.config
        if c.loss_type != "k1":
            kl = kl_estimate(replay.log_prob, self.taught(replay.log_prob.detach(), batch), c.loss_type)
            loss = loss + c.distillation_loss_coef * kl
        return super().regularize(loss, replay, batch, stats)


class Algorithm(Distilled):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.teachers = teachers_of(config)
        self.references = (*self.references, *(teacher.name for teacher in self.teachers))
