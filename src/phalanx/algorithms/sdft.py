"""SDFT: a language model learns from itself with a demonstration in its prompt (https://arxiv.org/abs/2601.19897).

The student samples from the prompt alone. The teacher, an average of the student's own weights, reads the same response
y behind a prompt that also has a context c: a text of the data, such as a demonstration, or what is known about the
sample afterwards (`context`). The loss is distillation's, with log pi_T = log pi_avg(y | x, c); after each training
step

    theta_avg <- (1 - teacher_update_rate) theta_avg + teacher_update_rate theta .

Only sampled tokens count, not those of an environment. A sample without a context has a KL of 0.

Deviations from the paper:
1. The KL is estimated at the sampled tokens and never summed over the vocabulary.
2. Samples without a context count in the mean of the loss, to which they add 0.
"""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from phalanx.algorithms.distillation import Distilled, DistilledConfig
from phalanx.config.fields import arg
from phalanx.config.ranges import expect, some_of
from phalanx.config.templates import has_fields
from phalanx.functional.tokens import TokenTrace
from phalanx.types import ASKED, TEACHER, Batch, Metric, Metrics

SOURCES = ("column", "peer", "environment", "reward")
FILLED = expect("a text with {prompt} and {context}, each once", lambda text: has_fields(text, "prompt", "context"))


@dataclass
class Config(DistilledConfig):
    """The configuration of `algorithm.name=sdft`."""

    context: list[str] = arg(
        ["column"],
        "what the teacher's prompt has beside the student's, in this order: column, the text in the column "
        "context_key; peer, a successful response to the same prompt; environment, its answers in the sample's own "
        "conversation; reward, the feedback of rewards on the sample",
        valid=some_of(SOURCES),
    )
    context_key: str = arg("privileged_context", "column of the data with the text that only the teacher's prompt has")
    context_forms: dict[str, str] = arg(
        {},
        "a source's text within the context, with {text} for it, by source; a column's text stands alone",
        valid=expect(
            f"texts with {{text}}, each once, by names of {', '.join(SOURCES)}",
            lambda forms: {*forms} <= {*SOURCES} and all(has_fields(form, "text") for form in forms.values()),
        ),
    )
    teacher_prompt_template: str = arg(
        "{prompt}\n\nThis is an example of a response:\n\n{context}\n\nNow answer with a response of your own.",
        "the teacher's last user message, with {prompt} for the student's and {context} for the context",
        valid=FILLED,
    )
    max_context_length: Optional[int] = arg(
        None,
        "tokens of a context, without the middle of a longer one; null: as many as the model's positions allow",
        ge=1,
    )
    success_reward_threshold: float = arg(1.0, "lowest reward of a successful response, for a peer")
    teacher_update_rate: float = arg(
        0.05,
        "share of the policy's weights in the teacher's new ones; 0: those at the start, 1: the last step's",
        ge=0,
        le=1,
    )


class Algorithm(Distilled):
    """The learning rule: see phalanx.types.Algorithm."""

    config: Config
    averages = (TEACHER,)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.references = (*self.references, TEACHER)

    def decay(self, name: str, step: int) -> float:
        """The weight of the average in its update after training step `step`."""
        return 1 - self.config.teacher_update_rate

    def taught(self, student: Tensor, batch: Batch[TokenTrace]) -> Tensor:
        """The teacher's log-probabilities [B, A], and those of the `student` where a sample has no context."""
        asked, teacher = batch.reference_outputs.get(ASKED), batch.reference_outputs.get(TEACHER)
        if teacher is None:  # no sample of the step has one
            return student
        return teacher if asked is None else torch.where((asked >= 0)[:, None], teacher, student)

    def divergence(self, kl: Tensor, batch: Batch[TokenTrace]) -> Metrics:
        """The KL [B, A] to the teacher of samples with a context, and their share."""
        asked = batch.reference_outputs.get(ASKED)
        if asked is None:
            return super().divergence(kl, batch)
        return {"teacher_kl": Metric(kl, where=(asked >= 0)[:, None]), "context_share": (asked >= 0).float()}
