"""What becomes a prompt of the painter, of a writer's response."""

import pytest

from phalanx.config.joint import RewriteConfig
from phalanx.rewards.verifier import Verifier, VerifierError
from phalanx.run.rewriting import as_original
from phalanx.run.rewriting import rewritten as rewritten_by
from phalanx.types import Prompt

LAST_GROUP = Verifier("last_group", 0.2)
TAGS = RewriteConfig(pattern="<prompt>(.*?)</prompt>", template="{}, oil on canvas")


def rewritten(response: str, config: RewriteConfig) -> str | None:
    return rewritten_by(response, config, LAST_GROUP)


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


def test_a_pattern_has_a_second_for_a_text() -> None:
    """It may take for ever on a text of the model; the next text gets its verdict."""
    config = RewriteConfig(pattern="((a+)+)b")
    with pytest.raises(VerifierError, match=r"no verdict within timeout_s=0\.2"):
        rewritten("a" * 10_000 + "c", config)
    assert rewritten("aab", config) == "aa"
    assert rewritten("x" * 10_000 + "aab", config) == "aa"
    assert rewritten("a", RewriteConfig(pattern="a|(b)")) is None


def test_a_picture_is_judged_by_the_original_prompt() -> None:
    shown = Prompt("a red fox", 3, {"ground_truth": "x", "original_prompt": "fox", "original_group": 1})
    assert as_original(shown).text == "fox" and as_original(shown).meta["ground_truth"] == "x"
    assert as_original(shown).group_id == 1
    plain = Prompt("fox", 3, {})
    assert as_original(plain) is plain
