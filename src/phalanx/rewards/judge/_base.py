"""The base classes of rewards that ask a model about each image or completion, or about pairs of them."""

from abc import ABC, abstractmethod
from typing import Any

from phalanx.rewards.base import RewardOutput, RewardWithExtras


class Judge(ABC):
    """A reward that asks the reward model (`reward.model`) about each image, one question by default, and reads the
    answer.

    `template` is the question: {prompt} in it stands for the image's prompt, {ground_truth} and so on for the columns
    of its data; braces that belong to the question are doubled. The constructor takes the configured kwargs.

    `takes` is "images", of a vision-language model, or "completions", of a language model: {completion} then stands for
    the text that is judged, which is beside the columns in the metadata of `question`.
    """

    template: str
    takes: str = "images"
    opens: bool = False  # whether it has an `opening`

    def opening(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The first question of a judge that `opens`; it and its answer stand before each of the `questions`."""
        return ""

    def questions(self, prompt: str, metadata: dict[str, Any]) -> list[str]:
        """The questions, each of which is answered by itself; `question` by default."""
        return [self.question(prompt, metadata)]

    def question(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The question about an image or a completion of `prompt`."""
        return self.template.format_map({**metadata, "prompt": prompt})

    @abstractmethod
    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """The score of an image or a completion by the model's answer; None if the answer cannot be read.

        Such answers are counted and scored with `reward.model.unparseable_score`.
        """

    def score(self, answers: list[str], prompt: str, metadata: dict[str, Any]) -> float | None:
        """The score by the answers to all `questions`; `parse` of the first by default."""
        return self.parse(answers[0], prompt, metadata)


class ParsedAnswers(RewardWithExtras):
    """The scores that a judge reads from the model's answers; it takes the place of a reward's function."""

    extras = ("unparseable",)

    def __init__(self, judge: Judge, unparseable_score: float) -> None:
        self.judge = judge
        self._unparseable_score = unparseable_score

    def __call__(self, answers: list[list[str]], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """The answers about B samples -> B scores, with 1 as `unparseable` for each that could not be read."""
        scores, unparseable = [], []
        for of_sample, prompt, meta in zip(answers, prompts, metadata, strict=True):
            score = self.judge.score(of_sample, prompt, meta)
            scores.append(self._unparseable_score if score is None else score)
            unparseable.append(float(score is None))
        return RewardOutput(scores, {"unparseable": unparseable})


class PairJudge(Judge):
    """A reward that asks the reward model which of two samples of a prompt is better; the score of a sample is its win
    rate against other samples of the prompt.

    `takes` may also be "outputs", of images or texts, whichever the job makes. Of texts, {completion_1} and
    {completion_2} in the template stand for the two; images are shown in this order, all frames of a video's first one
    before those of the second and {frames} being their number, behind those of the column `source_key` of the data,
    such as the image to edit.
    `opponents`: how many others each sample is compared with, None for all; an even number. `shuffle_order`: which of
    two samples comes first is drawn for each pair, else it is the one that was sampled first; `both_orders`: each pair
    is asked about twice.
    """

    takes = "outputs"
    opponents: int | None = None
    shuffle_order: bool = True
    both_orders: bool = False
    source_key: str | None = None

    @abstractmethod
    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """1 where the answer prefers the first of the two, 0 for the second and 1/2 for neither; None if it cannot
        be read, which is counted and scored as 1/2.
        """


class WinRates(ParsedAnswers):
    """The scores that comparisons have given; it takes the place of a reward's function."""

    def __call__(self, answers: Any, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """B win rates, each with the share of its answers that could not be read -> B scores, and the shares."""
        return RewardOutput([rate for rate, _ in answers], {"unparseable": [lost for _, lost in answers]})
