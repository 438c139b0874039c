"""Base classes of rewards that ask a model about each image or completion, or about pairs of them."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from phalanx.config.messages import cut, users_code
from phalanx.config.templates import WIDEST, too_wide
from phalanx.rewards.base import RewardError, RewardOutput, RewardWithExtras
from phalanx.types import Prompt


class Judge(ABC):
    """A reward that asks the reward model (`reward.model`) about each image, by default one question, and reads the
    answer.

    The constructor takes the configured kwargs.

    template: the question. {prompt} in it is replaced by the image's prompt, and {ground_truth} etc. by the columns of
        its data; other braces must be doubled.
    takes: "images", for a vision-language model, or "completions", for a language model. {completion} is then replaced
        by the text to judge, which `question` also finds in its metadata.
    """

    template: str
    takes: str = "images"
    opens: bool = False  # whether it has an `opening`

    def opening(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The first question of a judge that `opens`; it and its answer precede each of the `questions`."""
        return ""

    def questions(self, prompt: str, metadata: dict[str, Any]) -> list[str]:
        """The questions, which are answered independently; by default only `question`."""
        return [self.question(prompt, metadata)]

    def question(self, prompt: str, metadata: dict[str, Any]) -> str:
        """The question about an image or a completion of `prompt`."""
        return self.template.format_map({**metadata, "prompt": prompt})

    @abstractmethod
    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """The score of an image or a completion, given the model's answer; None if the answer cannot be parsed.

        Unparseable answers are counted, and scored with `reward.model.unparseable_score`.
        """

    def score(self, answers: list[str], prompt: str, metadata: dict[str, Any]) -> float | None:
        """The score, given the answers to all `questions`; by default `parse` of the first one."""
        return self.parse(answers[0], prompt, metadata)


def checked_template(template: str) -> str:
    """A template of the configuration, unchanged. Raises ValueError, with one line, if it cannot be filled in."""
    try:
        field = too_wide(template)
    except ValueError as error:
        raise ValueError(
            f"template {cut(template)!r} is not valid: {error}; braces that are not fields are doubled"
        ) from None
    if field is not None:
        raise ValueError(f"template: {cut(field)} would be filled up to more than {WIDEST} characters")
    return template


def asking(name: str, prompt: Prompt) -> AbstractContextManager[None]:
    """A context in which a judge's code writes a question about samples of a prompt; see `users_code`."""
    data = f' on the prompt "{prompt.text}"; its data has {", ".join(prompt.meta) or "no columns"}'
    return users_code(f"reward {name!r} has no question:", data, RewardError)


class ParsedAnswers(RewardWithExtras):
    """Scores that a judge parses from the model's answers, in place of a reward's function."""

    extras = ("unparseable",)

    def __init__(self, judge: Judge, unparseable_score: float) -> None:
        self.judge = judge
        self._unparseable_score = unparseable_score

    def __call__(self, answers: list[list[str]], prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """B scores from the answers about B samples, with the extra `unparseable`, 1 for each that has no score."""
        scores, unparseable = [], []
        for of_sample, prompt, meta in zip(answers, prompts, metadata, strict=True):
            score = self.judge.score(of_sample, prompt, meta)
            scores.append(self._unparseable_score if score is None else score)
            unparseable.append(float(score is None))
        return RewardOutput(scores, {"unparseable": unparseable})


class PairJudge(Judge):
    """A reward that asks the reward model which of two samples of a prompt is better; a sample's score is its win rate
    against other samples of the prompt.

    `takes` may also be "outputs", for images or texts, whichever the job generates. For texts, the template has
    {completion_1} and {completion_2}. Images are shown in the same order, after those of the data's column
    `source_key`; for videos, all {frames} frames of the first one precede those of the second.

    opponents: number of other samples that each sample is compared with, an even number; None: all.
    shuffle_order: draw the order of the two samples for each pair; otherwise the one sampled first comes first.
    both_orders: ask about each pair in both orders.
    source_key: column of the data with images to show first, such as the image to edit.
    """

    takes = "outputs"
    opponents: int | None = None
    shuffle_order: bool = True
    both_orders: bool = False
    source_key: str | None = None

    @abstractmethod
    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> float | None:
        """1 if the answer prefers the first sample, 0 for the second one and 1/2 for neither; None if the answer cannot
        be parsed, which is counted and scored as 1/2.
        """


class WinRates(ParsedAnswers):
    """Scores from comparisons of pairs, in place of a reward's function."""

    def __call__(self, answers: Any, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardOutput:
        """B scores from B win rates, each with the fraction of its answers that could not be parsed, an extra."""
        return RewardOutput([rate for rate, _ in answers], {"unparseable": [lost for _, lost in answers]})
