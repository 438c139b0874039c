"""Self-distillation of flow models: a painter of the data's prompt learns from itself with a richer prompt.

opd's loss with the policy itself as the teacher, at the states that the student visits with the prompt x: the teacher,
an average of the student's own weights, has the prompt c in the column `context_key` instead, such as one that a
language model wrote. So what an enhancer of prompts adds becomes part of the model. After each training step

    theta_avg <- (1 - teacher_update_rate) theta_avg + teacher_update_rate theta .

This is sdft (https://arxiv.org/abs/2601.19897) for flow models, whose steps have an exact KL.

Deviations from the paper:
1. It is for language models; the loss here is that of DiffusionOPD (https://arxiv.org/abs/2605.15055), see opd.
"""

from dataclasses import dataclass

from phalanx.algorithms import opd
from phalanx.algorithms._bases import GroupAlgorithm
from phalanx.config.fields import arg
from phalanx.types import TEACHER


@dataclass
class Config(opd.LossConfig):
    """The configuration of `algorithm.name=flow_sdft`."""

    context_key: str = arg("enhanced_prompt", "column of the data with the teacher's prompt")
    teacher_update_rate: float = arg(
        0.05,
        "share of the policy's weights in the teacher's new ones; 0: those at the start, 1: the last step's",
        ge=0,
        le=1,
    )


class Algorithm(opd.Algorithm):
    """The learning rule: see phalanx.types.Algorithm. All samples count, whatever their rewards."""

    config: Config  # type: ignore[assignment]
    averages = (TEACHER,)

    def __init__(self, config: Config) -> None:
        GroupAlgorithm.__init__(self, config)
        self.references = (*self.references, TEACHER)

    def decay(self, name: str, step: int) -> float:
        """The weight of the average in its update after training step `step`."""
        return 1 - self.config.teacher_update_rate
