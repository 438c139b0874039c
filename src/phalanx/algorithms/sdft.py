"""SDFT: a language model learns from itself with a demonstration in its prompt (https://arxiv.org/abs/2601.19897).

The student samples from the prompt alone. The teacher, an average of the student's own weights, reads the same response
behind a prompt that also has the text in the column `context_key`: a demonstration, or feedback such as a solution
(SDPO, https://arxiv.org/abs/2601.20802). The loss is distillation's, with log pi_T = log pi_avg(y | x, c); after each
training step

    theta_avg <- (1 - teacher_update_rate) theta_avg + teacher_update_rate theta .

Deviations from the papers:
1. The KL is estimated at the sampled tokens and never summed over the vocabulary.
2. The context is a column of the data. SDPO also takes the environment's output and successful responses of the group.
"""

from dataclasses import dataclass

from phalanx.algorithms.distillation import Distilled, DistilledConfig
from phalanx.config.fields import arg
from phalanx.config.ranges import expect
from phalanx.config.templates import has_fields
from phalanx.types import TEACHER


@dataclass
class Config(DistilledConfig):
    """The configuration of `algorithm.name=sdft`."""

    context_key: str = arg("privileged_context", "column of the data with the text that only the teacher's prompt has")
    teacher_prompt_template: str = arg(
        "{prompt}\n\nThis is an example of a response:\n\n{context}\n\nNow answer with a response of your own.",
        "the teacher's last user message, with {prompt} for the student's and {context} for the text",
        valid=expect(
            "a text with {prompt} and {context}, each once", lambda text: has_fields(text, "prompt", "context")
        ),
    )
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
