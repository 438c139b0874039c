"""SDPO: a language model learns from itself with feedback on its own samples in its prompt
(https://arxiv.org/abs/2601.20802).

sdft whose context is known after sampling: a successful response of the same prompt's group, the environment's answers,
and the texts of rewards. Rewards then choose the demonstrations, and have no advantages unless use_task_rewards.

Deviations from the paper, beside those of sdft:
1. The demonstration of a successful sample is another successful one.
2. The environment's answers in all turns of the sample are one text.
"""

from dataclasses import dataclass

from phalanx.algorithms import sdft
from phalanx.config.fields import arg
from phalanx.config.ranges import some_of


@dataclass
class Config(sdft.Config):
    """The configuration of `algorithm.name=sdpo`."""

    context: list[str] = arg(
        ["peer", "environment", "reward"],
        "what the teacher's prompt has beside the student's, see sdft",
        valid=some_of(sdft.SOURCES),
    )
    teacher_prompt_template: str = arg(
        "{prompt}\n\n{context}\n\nNow answer the question correctly.",
        "the teacher's last user message, with {prompt} for the student's and {context} for the context",
        valid=sdft.FILLED,
    )
    use_task_rewards: bool = arg(False, "also learn from rewards, as grpo does")


class Algorithm(sdft.Algorithm):
    """The learning rule: see phalanx.types.Algorithm."""
