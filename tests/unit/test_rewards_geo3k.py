"""The reward geo3k: verl's weights of answer and form."""

import time

import pytest

from phalanx.zoo.rewards.text.geo3k import Geo3k, formed

THOUGHT = "<think>so</think> it is "


def score(completion: str, truth: str = r"2 \sqrt{3}", **kwargs: float) -> float:
    output = Geo3k(equivalence="string", **kwargs)([completion], [""], [{"ground_truth": truth}])
    return float(output.scores[0])


def test_answers_and_forms() -> None:
    assert score(THOUGHT + r"\boxed{2\sqrt{3}}.") == pytest.approx(1.0)
    assert score(r"it is \boxed{2\sqrt{3}}") == pytest.approx(0.9)
    assert score(THOUGHT + r"\boxed{4}") == pytest.approx(0.1)
    assert score("no") == 0
    assert score(r"\boxed{2\sqrt{3}}", format_weight=0.5) == 0.5
    with pytest.raises(ValueError, match="no ground_truth"):
        Geo3k(equivalence="string").check_row("", {})


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<think></think>\\boxed{}", True),
        ("<think>a\n</think>\n\\boxed{1}\n", True),
        (" <think></think>\\boxed{1}", False),  # it begins with the tag
        ("<think>\\boxed{1}</think>", False),
        ("<think>\\boxed{1}</think> </think>\\boxed{2} x", True),
        ("<think></think>\\boxed{1", False),
    ],
)
def test_the_form(text: str, good: bool) -> None:
    assert formed(text) is good


def test_hostile_texts_take_no_time() -> None:
    begin = time.thread_time()
    for text in ("<think>" * 30_000, "<think>" + "</think>\\boxed{" * 20_000, "\\boxed{" * 30_000):
        assert score(text) == 0
    assert time.thread_time() - begin < 2
