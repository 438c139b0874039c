"""Recall of a long text's words or characters in texts, real images and a judge's answers."""

import pytest
import torch

from phalanx.types import Prompt
from phalanx.zoo.rewards._recall import matched
from phalanx.zoo.rewards.judge.vlm_ocr import VlmOcr
from tests.helpers.rewards import entry, rewards, scored, told
from tests.unit.test_rewards_ocr import picture


@pytest.mark.parametrize(
    ("target", "read", "expected"),
    [
        ("Open daily, 9-17", "OPEN DAILY 917", (3, 3)),  # without case and marks, which join what they part
        ("to be or not to be", "be to", (2, 6)),  # a word counts as often as the target has it
        ("be", "be be be", (1, 1)),
        ("café déjà", "cafe Déjà", (1, 2)),
        ("left right", "right\nleft", (2, 2)),
        ("left right", "leftright", (0, 2)),
        ("a", "", (0, 1)),
        ("…", "…", (0, 0)),
    ],
)
def test_words(target: str, read: str, expected: tuple[int, int]) -> None:
    assert matched(target, read, "words") == expected


@pytest.mark.parametrize(
    ("target", "read", "expected"),
    [
        ("每日新鲜, 始于 1998", "始于1998年 每日", (8, 10)),
        ("天天", "天", (1, 2)),
        ("Ab", "aB", (0, 2)),  # as they are
        ("上海", "海 上", (2, 2)),
    ],
)
def test_characters(target: str, read: str, expected: tuple[int, int]) -> None:
    assert matched(target, read, "characters") == expected


def test_the_words_of_a_picture() -> None:
    """The column is a list of texts. Extras are the numbers of words, for the recall over all prompts."""
    line = picture({(4, 2): "hello world 2024"}, (160, 24), 18)
    prompts = [Prompt("", 0, {"text": ["2024", "Hello  world"]}), Prompt("", 1, {"text": "hello you"})]
    reward = rewards(entry("ocr", detect=False, recall="words", column="text"))
    assert scored(reward, (torch.stack([line, line]), prompts)) == {
        "ocr": [1.0, 0.5], "ocr_matched": [3.0, 1.0], "ocr_expected": [3.0, 2.0],
    }  # fmt: skip
    objection = reward.terms[0].objection
    assert objection("p", {"text": ["?"]}) == "text '?' has no letters or digits that recall could count"
    assert objection("p", {"ground_truth": "a"}) == 'no text for the prompt "p" (expected a column text in the data)'


def test_a_judge_reads_the_words() -> None:
    judge, row = VlmOcr(recall="words", column="text"), {"text": ["one two", "three"]}
    assert judge.question("p", row) == VlmOcr.template
    assert judge.parse("Three, one", "p", row) == pytest.approx(2 / 3)
    assert VlmOcr(recall="characters", column="text").parse("", "p", row) == 0.0
    assert told(ValueError, judge.question, "p", {"text": "?!"}) == (
        "text '?!' has no letters or digits that recall could count"
    )


def test_mistakes() -> None:
    assert "without contains and exact" in told(ValueError, rewards, entry("ocr", recall="words", exact=True))
