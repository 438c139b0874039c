"""Judges of pairs without a model: questions, scores of answers, and which pairs are compared."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.rewards import RewardError, RewardOutput
from phalanx.rewards.client import without_filling
from phalanx.rewards.judge import WinRates
from phalanx.rewards.judge_pairs import Comparison, Subject, pairings
from phalanx.rewards.registry import build_terms
from phalanx.types import Prompt
from phalanx.zoo.rewards.judge.pairwise_judge import PairwiseJudge
from tests.helpers.ranks import run_ranks
from tests.helpers.rewards import entry, told


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("<think>Image 2 is better at hands.</think>\n<answer>Image 1 is better</answer>", 1.0),
        ("<think>1</think><answer>Image 2 is better</answer>", 0.0),
        ("<answer>Edited image 2 is better</answer>", 0.0),
        ("<think></think>Video 1 is better.", 1.0),
        ("<answer>Answer 1 is better</answer> No: <answer>Answer 2 is better</answer>", 0.0),
        ("<answer>Neither is better</answer>", 0.5),
        ("<answer>It is a tie.</answer>", 0.5),
        ('{"categories": [{"cat_winner": "Image 1"}], "reason": "...", "winner": "Image 2"}', 0.0),
        ("<think>Image 1 is better at", None),
        ("<answer>Image 11 is better</answer>", None),
        ("<answer></answer>", None),
        ("", None),
    ],
)
def test_an_answer_is_a_verdict(answer: str, verdict: float | None) -> None:
    assert PairwiseJudge().parse(answer, "", {}) == verdict


def test_questions_suit_what_is_compared() -> None:
    judge = PairwiseJudge()
    assert judge.question("a {dog}", {}).startswith("Two images were generated for this caption:\n[a {dog}]\n")
    assert "The first 4 frames are those of video 1" in judge.question("a dog", {"frames": 4})
    asked = judge.question("1+1", {"completion_1": "two", "completion_2": "{3}"})
    assert "Answer 1:\ntwo\n\nAnswer 2:\n{3}\n" in asked
    assert "<answer>Answer 1 is better</answer>" in asked
    edits = PairwiseJudge(source_key="image")
    assert "edited twice by this instruction:\n[make it red]" in edits.question("make it red", {"image": None})
    for meta in ({}, {"image": "a.png"}):
        assert told(ValueError, edits.check_row, "p", meta) == "it has no image in the column 'image' (source_key)"
    assert PairwiseJudge(template="{prompt}?").question("a", {}) == "a?"


def test_all_or_some_opponents() -> None:
    assert pairings(4, None) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert len(pairings(24, None)) == 24 * 23 // 2
    assert pairings(1, None) == pairings(1, 4) == []
    assert pairings(5, 4) == pairings(5, 8) == pairings(5, None)
    for count, opponents in ((4, 2), (7, 4), (24, 6)):
        met = Counter(i for pair in pairings(count, opponents) for i in pair)
        assert met == dict.fromkeys(range(count), opponents)


def test_it_takes_what_the_job_makes() -> None:
    for outputs in ("images", "completions"):
        (term,) = build_terms([entry("pairwise_judge", opponents=4)], "cpu", 0.0, outputs)
        assert term.takes == outputs and isinstance(term.function, WinRates)
        assert term.rows == ("pairwise_judge", "pairwise_judge_unparseable")
        assert term.function([(0.75, 0.5)], ["p"], [{}]) == RewardOutput([0.75], {"unparseable": [0.5]})
    for opponents in (1, 3):
        for name, path in (("pairwise_judge", None), ("Reading", "tests.helpers.judged_pairs:Reading")):
            assert told(ConfigError, build_terms, [entry(name, path, opponents=opponents)], "cpu", 0.0) == (
                f"reward.functions[0] ({name}): opponents={opponents} should be an even number, such as 4, or null for all"
            )


def test_what_fills_up_ranks_is_in_no_group() -> None:
    prompts = [Prompt("a", 0, {}), Prompt("b", 1, {}), Prompt("b", 1, {}), Prompt("b", 1, {})]
    groups = [prompt.group_id for prompt in without_filling(prompts, 4, 6)]
    assert groups == [0, 1, -7, -8]


@dataclass
class Picture:
    """The parts of a data file's image that a judge needs; it can be read only once."""

    contents: list[bytes]

    @property
    def parts(self) -> list["Picture"]:
        return [self]

    def encoded(self) -> bytes:
        return self.contents.pop()


def asked(judge: PairwiseJudge, subjects: list[Subject], answer: str, of_text: bool) -> Any:
    """On one rank: the files and questions of a judge, and the win rates from equal answers."""
    seen: list[Any] = []

    def ask(files: list[bytes], questions: list[Any]) -> list[str]:
        seen.append((files, questions))
        return [answer] * len(questions)

    comparison = Comparison(subjects, 0, 1, None)
    return comparison.win_rates("pairs", judge, ask, of_text=of_text), seen


def test_texts_are_compared_within_their_prompt() -> None:
    """Images of a prompt are sent once; a sample without opponents has win rate 1/2."""
    one, two = Prompt("a", 0, {}), Prompt("b", 1, {})
    subjects = [Subject(one, (text.encode(),), (b"png",)) for text in ("x", "ü", "z")] + [Subject(two, (b"w",))]
    judge = PairwiseJudge(template="{completion_1}|{completion_2}", shuffle_order=False)
    ((rates, seen),) = run_ranks(asked, 1, judge, subjects, "<answer>Answer 1 is better</answer>", True)
    assert seen == [([b"png"], [((0,), "x|ü"), ((0,), "x|z"), ((0,), "ü|z")])]
    assert rates == [(1.0, 0.0), (0.5, 0.0), (0.0, 0.0), (0.5, 0.0)]
    ((rates, _),) = run_ranks(asked, 1, judge, subjects, "?", True)
    assert rates == [(0.5, 1.0)] * 3 + [(0.5, 0.0)]


class Loose(PairwiseJudge):
    """Takes any JSON as its verdict."""

    def parse(self, answer: str, prompt: str, metadata: dict[str, Any]) -> Any:
        return json.loads(answer)


def refused(subjects: list[Subject], answer: str) -> str:
    return told(RewardError, asked, Loose(), subjects, answer, True)


@pytest.mark.parametrize(("answer", "verdict"), [('"1"', "'1'"), ("NaN", "nan"), ("2", "2"), ("[1]", "[1]")])
def test_a_verdict_that_is_no_share_is_refused(answer: str, verdict: str) -> None:
    subjects = [Subject(Prompt("a", 0, {}), (text,)) for text in (b"x", b"y")]
    assert run_ranks(refused, 1, subjects, answer) == [
        f"reward 'pairs': parse returned {verdict}; expected 1 for the first sample, 0 for the second, 1/2 for neither, or "
        "None"
    ]


def test_edits_and_videos_are_shown_in_order() -> None:
    prompt = Prompt("make it red", 0, {"image": Picture([b"source"])})
    subjects = [Subject(prompt, (b"1a", b"1b")), Subject(prompt, (b"2a", b"2b"))]
    judge = PairwiseJudge(template="{frames}", shuffle_order=False, both_orders=True, source_key="image")
    ((rates, seen),) = run_ranks(asked, 1, judge, subjects, '"winner": "Image 2"', False)
    assert seen == [([b"source", b"1a", b"1b", b"2a", b"2b"], [((0, 1, 2, 3, 4), "2"), ((0, 3, 4, 1, 2), "2")])]
    assert rates == [(0.5, 0.0)] * 2  # each was the second one once
