"""The rewards math, dapo and geo3k on pairs of answers in the forms of MATH, in both directions."""

import resource
from pathlib import Path

from phalanx.zoo.rewards.text._answers import canonical, normalised, parted, written
from phalanx.zoo.rewards.text.dapo import Dapo
from phalanx.zoo.rewards.text.geo3k import Geo3k
from phalanx.zoo.rewards.text.math import Math

PAIRS = Path(__file__).parents[1] / "math_answers.tsv"
Pair = tuple[str, str, bool, bool, str]


def pairs() -> list[Pair]:
    """(truth, answer, right, whether commit 7178aab took it, why it is refused although 7178aab took it)."""
    rows: list[Pair] = []
    for line in PAIRS.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            truth, answer, right, was, *reason = line.split("\t")
            rows.append((truth, answer, right == "1", was == "1", "".join(reason)))
    return rows


def test_pairs_of_math() -> None:
    rows = pairs()
    boxes, truths = [rf"so \boxed{{{row[1]}}}." for row in rows], [{"ground_truth": row[0]} for row in rows]
    result = Math()(boxes, [""] * len(rows), truths)
    assert [row for row, score in zip(rows, result.scores, strict=True) if score != row[2]] == []
    assert sum(result.extras["unjudged"]) == 0
    assert len(rows) > 700 and sum(row[2] for row in rows) > 400 and sum(not row[2] for row in rows) > 200


def test_what_was_accepted_once_is_accepted_or_has_a_reason() -> None:
    assert [row for row in pairs() if row[3] and not row[2] and not row[4]] == []
    assert len({row[4] for row in pairs()} - {""}) <= 7


def test_no_wrong_answer_is_accepted_without_math_verify() -> None:
    rows = pairs()
    lines, truths = [f"Answer: {row[1]}" for row in rows], [{"ground_truth": row[0]} for row in rows]
    scores = Dapo(0.0)(lines, [""] * len(rows), truths).scores
    assert [row for row, score in zip(rows, scores, strict=True) if score and not row[2]] == []
    assert sum(scores) > 250  # of texts and numbers
    text = Math("string")([rf"\boxed{{{row[1]}}}" for row in rows], [""] * len(rows), truths).scores
    assert [row for row, score, other in zip(rows, text, scores, strict=True) if score != other] == []


def test_geo3k_takes_what_math_takes() -> None:
    answers = [r"32,\! 349", r"6 \text{ and } 8", r"\log_2 8", r"\frac 1 2", "1 2"]
    truths = [{"ground_truth": truth} for truth in ("32349", "8,6", "3", "0.5", "3")]
    boxes = [rf"\boxed{{{answer}}}" for answer in answers]
    assert list(Geo3k(format_weight=0)(boxes, [""] * 5, truths).scores) == [1, 1, 1, 1, 0]


def test_the_spelling_for_math_verify() -> None:
    spellings = {
        r"32,\! 349": "32349",
        r"\left( 100,200 \right)": "( 100,200 )",
        r"x \in (100,200)": r"x \in (100,200)",
        r"\dfrac 1 2 + \log_2 8": r"\frac{1}{2} + \log_{2} 8",
        "1 1/2": r"1\frac{1}{2}",
        r"1.1\overline{6}": r"\frac{7}{6}",
        r"2 \pm \sqrt3": r"2 + \sqrt{3}, 2 - \sqrt{3}",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    }
    assert {text: written(text) for text in spellings} == spellings
    assert normalised(r"x = 5 \text{ or } x = 6") == "5,6"
    assert canonical("x=3, y=5") == canonical("y = 5, x = 3") == "(3,5)"
    assert [parted(text) for text in ("1 2", "3 .5", r"\log_{2} 8", "1, 2", "2x 3")] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_long_texts_take_linear_time() -> None:
    """Of 100 kB each, where a search would look at each place for an end that is far or not there."""
    parts = ["2", "2 ", "2,", "2,222", "2/", " ", "=", r"\!", "{,", "(", "(2,", r"\{", r"\frac ", r"\sqrt", "_", ".2"]
    parts += [r"\overline{", "2.", " and", ", ", r"\text{", r"\text{ and ", r"\pm", "2 2/", r"\ ", "\\", "x=2,", "~ "]
    for part in parts:
        text = part * (100_000 // len(part))
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        canonical(text), parted(written(text))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - begin < 1, part
