"""What becomes a prompt of the painter, of a writer's response."""

import pytest

from phalanx.config.joint import RewriteConfig
from phalanx.training.rewriting import as_original, rewritten
from phalanx.types import Prompt

TAGS = RewriteConfig(pattern="<prompt>(.*?)</prompt>", template="{}, oil on canvas")


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("a red\n  fox ", "a red fox"),
        ("<think>a fox?\nred</think>\na red fox", "a red fox"),
        ("it is red</think> a red fox", "a red fox"),  # the chat template has opened the block
        ("a fox <think>which one", "a fox"),  # the limit has cut it
        ("<think>which one", None),
        (" \n", None),
        ("{0} and {name}", "{0} and {name}"),
    ],
)
def test_a_response_without_its_thoughts(response: str, text: str | None) -> None:
    assert rewritten(response, RewriteConfig()) == text


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("Here: <prompt>a\nfox</prompt>", "a fox, oil on canvas"),
        ("<prompt>a</prompt> no, <prompt>a {fox}</prompt>", "a {fox}, oil on canvas"),
        ("<prompt>a</prompt><think><prompt>b</prompt>", "a, oil on canvas"),
        ("a fox", None),
        ("<prompt> </prompt>", None),
    ],
)
def test_the_last_match_is_the_prompt(response: str, text: str | None) -> None:
    assert rewritten(response, TAGS) == text


def test_digits_are_filled_up_by_the_template() -> None:
    config = RewriteConfig(pattern=r"#### *(\d+)", template='the number "{:0>3}"')
    assert rewritten("18-16=2\n#### 20", config) == 'the number "020"'


def test_a_picture_is_judged_by_the_original_prompt() -> None:
    shown = Prompt("a red fox", 3, {"ground_truth": "x", "original_prompt": "fox"})
    assert as_original(shown).text == "fox" and as_original(shown).meta["ground_truth"] == "x"
    plain = Prompt("fox", 3, {})
    assert as_original(plain) is plain
