"""Rewards of texts."""

import pytest

from phalanx.zoo.rewards.text.gsm8k import Gsm8k


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [
        ("5*8=40. 40-12=28.\n#### 28", 1, 1),
        ("#### 28.", 1, 1),
        ("#### 28.0", 1, 1),
        ("####28", 1, 1),
        ("#### $28", 1, 1),
        ("#### 27\n#### 28", 1, 1),  # the last one counts
        ("#### 28\n#### 27", 0, 0),
        ("The answer is 28.", 0, 1),
        ("#### 28 pens of 40", 1, 0),
        ("#### 128", 0, 0),
        ("#### -28", 0, 0),
        ("#### ", 0, 0),
        ("", 0, 0),
        ("#### 28" + " " * 300, 1, 1),
        ("#### 28" + " that is all" * 40, 1, 1),
        ("#### +28", 1, 1),
        ("#### **28**", 1, 1),
        ("**#### $ 28**", 1, 1),
        ("#### 20 + 8 = 28", 1, 1),
        ("#### 28 + 3 = 31", 0, 0),
        ("#### 28 + 3", 0, 0),
        ("#### 28/3", 0, 0),
        ("#### 56/2", 1, 1),
        ("#### 28e3", 0, 0),
        ("#### 2.8e1", 1, 1),
        ("#### 2_8", 0, 0),
        ("#### 28_1", 0, 0),
        ("#### 28, 349", 0, 0),
    ],
)
@pytest.mark.parametrize("truth", ["28", 28, "5*8=40\n40-12=28\n#### 28"])
def test_gsm8k(completion: str, strict: int, flexible: int, truth: object) -> None:
    for method, score in (("strict", strict), ("flexible", flexible)):
        assert Gsm8k(method)([completion], ["?"], [{"ground_truth": truth}]) == [score], method


def test_gsm8k_with_thousands_and_decimals() -> None:
    reward = Gsm8k(format_score=0.1)
    truths = [{"ground_truth": "1,018"}, {"ground_truth": "0.5"}, {"ground_truth": "7"}, {"ground_truth": "7"}]
    assert reward(["#### 1018", "#### .5", "#### 8", "no number"], ["?"] * 4, truths) == [1, 1, 0.1, 0]
    negative = ["#### $-5", "#### -$5", "#### \u22125", "#### 5", "#### -5.0"]
    assert reward(negative, ["?"] * 5, [{"ground_truth": "-5"}] * 5) == [1, 1, 1, 0.1, 1]
    fractions = ["#### 3/4", "#### 0.75", "#### 1 1/2", "#### 3", "#### 3/0"]
    assert reward(fractions, ["?"] * 5, [{"ground_truth": t} for t in ("0.75", "3/4", "1.5", "3/4", "3")]) == [
        *(1, 1, 1),
        *(0.1, 0),
    ]


def test_gsm8k_without_a_ground_truth() -> None:
    with pytest.raises(ValueError, match="gsm8k needs a ground_truth"):
        Gsm8k()(["#### 1"], ["?"], [{}])
    with pytest.raises(ValueError, match="gsm8k: the ground_truth 'seven' is not a number"):
        Gsm8k()(["#### 1"], ["?"], [{"ground_truth": "seven"}])
    for value in ("NaN", float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"gsm8k: the ground_truth '{value}' is not a number"):
            Gsm8k()(["#### 1"], ["?"], [{"ground_truth": value}])
