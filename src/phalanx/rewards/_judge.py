"""The base class of rewards that ask a vision-language model about each image."""

from abc import ABC, abstractmethod
from typing import Any

from phalanx.rewards._base import Marked, Marking


class Judge(ABC):
    """A reward that asks the reward model (`reward.model`) one question about each image and reads its answer.

    `template` is the question: {prompt} in it stands for the image's prompt, {ground_truth} and so on for the columns
    of its data; braces that belong to the question are doubled. The constructor takes the configured kwargs.
    """

    template: str

    def question(self, prompt: str, metadata: dict[str, Any]) -> str:
        """What is asked about an image of `prompt`."""
        return self.template.format_map({**metadata, "prompt": prompt})

    @abstractmethod
    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """The score of an image by the model's answer; None where the answer cannot be read.

        Such answers are counted and scored with `reward.model.unparseable_score`.
        """


class Reading(Marking):
    """What a judge makes of the model's answers; it takes the place of a reward's function."""

    marks = ("unparseable",)

    def __init__(self, judge: Judge, unparseable_score: float) -> None:
        self.judge = judge
        self._unparseable_score = unparseable_score

    def __call__(self, answers: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> Marked:
        """B answers -> B scores; those answers that could not be read are marked."""
        parsed = [self.judge.parse(*each) for each in zip(answers, prompts, metadata, strict=True)]
        scores = [self._unparseable_score if score is None else score for score in parsed]
        return Marked(scores, {"unparseable": [float(score is None) for score in parsed]})
