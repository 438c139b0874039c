"""The base class of rewards that ask a model about each image or completion."""

from abc import ABC, abstractmethod
from typing import Any

from phalanx.rewards.base import RewardOutput, RewardWithExtras


class Judge(ABC):
    """A reward that asks the reward model (`reward.model`) one question about each image and reads its answer.

    `template` is the question: {prompt} in it stands for the image's prompt, {ground_truth} and so on for the columns
    of its data; braces that belong to the question are doubled. The constructor takes the configured kwargs.

    `takes` is "images", of a vision-language model, or "completions", of a language model: {completion} then stands for
    the text that is judged, which is beside the columns in the metadata of `question`.
    """

    template: str
    takes: str = "images"

    def question(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The question about an image or a completion of `prompt`."""
        return self.template.format_map({**metadata, "prompt": prompt})

    @abstractmethod
    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """The score of an image or a completion by the model's answer; None where the answer cannot be read.

        Such answers are counted and scored with `reward.model.unparseable_score`.
        """


class ParsedAnswers(RewardWithExtras):
    """The scores that a judge reads from the model's answers; it takes the place of a reward's function."""

    extras = ("unparseable",)

    def __init__(self, judge: Judge, unparseable_score: float) -> None:
        self.judge = judge
        self._unparseable_score = unparseable_score

    def __call__(self, answers: list[str], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """B answers -> B scores, with 1 as `unparseable` for each answer that could not be read."""
        scores, unparseable = [], []
        for answer, prompt, meta in zip(answers, prompts, metadata, strict=True):
            score = self.judge.parse(answer, prompt, meta)
            scores.append(self._unparseable_score if score is None else score)
            unparseable.append(float(score is None))
        return RewardOutput(scores, {"unparseable": unparseable})
