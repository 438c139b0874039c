"""T2I-CompBench's questions to a judge for each category, and the scores of answers."""

import hashlib
from typing import Any

import pytest

from phalanx.rewards.base import RewardError
from phalanx.rewards.judge_pool import _questions_of
from phalanx.types import Prompt
from phalanx.zoo.rewards.judge.t2i_compbench import QUESTIONS, T2iCompbench
from tests.helpers.rewards import told

PARTS: dict[str, Any] = {
    "category": "color",
    "phrases": ["a green bench", "a blue bowl"],
    "nouns": ["bench", "bowl"],
    "attributes": ["green", "blue"],
}
ANSWER = '{{"score": {}, "explanation": "It is as it is."}}'
CATEGORIES = "color, shape, texture, spatial, 3d_spatial, non_spatial, complex, numeracy"


def test_questions_about_parts() -> None:
    judge = T2iCompbench()
    assert judge.opens and not T2iCompbench(describe=False).opens
    assert judge.opening("p", PARTS) == (
        "You are my assistant to identify any objects and their color in the image. Briefly describe what it is in the "
        "image within 50 words."
    )
    first, second = judge.questions("a green bench and a blue bowl", PARTS)
    assert first == (
        "According to the image and your previous answer, evaluate if there is a green bench in the image. \n Give a "
        "score from 1 to 4, according the criteria:\n 4: there is bench in the image, and the bench is green. \n 3: "
        "there is bench in the image, bench is mostly green. \n 2: there is bench in the image, but bench is not green. "
        "\n 1: no bench in the image. \n Provide your analysis and explanation in JSON format with the following keys: "
        "score (e.g., 1), \n explanation (within 20 words)."
    )
    assert second == first.replace("bench", "bowl").replace("green", "blue")


@pytest.mark.parametrize("category", ["spatial", "3d_spatial", "non_spatial", "complex", "numeracy"])
def test_questions_about_the_whole(category: str) -> None:
    """The category is that of all prompts or of the row; braces in a prompt are kept."""
    (question,) = T2iCompbench(category).questions("a {red} cat", {})
    assert [question] == T2iCompbench().questions("a {red} cat", {"category": category})
    assert '"a {red} cat"' in question and "Give a score from 1 to 5" in question
    assert T2iCompbench(category).opening("", {}).startswith("You are my assistant to ")
    for level in range(1, 6):
        assert question.count(f"\n {level}: ") == 1


def test_every_category_has_texts_of_its_own() -> None:
    assert list(QUESTIONS) == CATEGORIES.split(", ")
    for kind in ("describe", "grade"):
        assert len({texts[kind] for texts in QUESTIONS.values()}) == 5
    # an editor that strips blanks would change them without an error
    digest = hashlib.sha256("".join(texts["grade"] for texts in QUESTIONS.values()).encode()).hexdigest()
    assert digest == "1fde4b855f144b0839142e05c3c69e32dfa216a01e14d21fe67394f45f8754bd"


@pytest.mark.parametrize(
    ("answer", "of_four", "of_five"),
    [
        (ANSWER.format(1), 0.1, 0.2),
        (ANSWER.format(2), 0.2, 0.4),
        (ANSWER.format(3), 0.75, 0.6),
        (ANSWER.format(4), 1.0, 0.8),
        (ANSWER.format(5), None, 1.0),
        (ANSWER.format('"4"'), 1.0, 0.8),
        (ANSWER.format("4.0"), 1.0, 0.8),
        ('{"score": 3, "explanation": "The bench', 0.75, 0.6),  # cut off, as answers at max_tokens are
        ('{\n  "explanation": "It is.",\n  "score": 3\n}', 0.75, 0.6),
        ("```json\n" + ANSWER.format(4) + "\n```", 1.0, 0.8),
        ("So:\n" + ANSWER.format(1) + "\nNo:\n" + ANSWER.format(4), 1.0, 0.8),
        (ANSWER.format(0), None, None),
        (ANSWER.format(45), None, None),
        (ANSWER.format("4/5"), None, None),
        (ANSWER.format('"4/5"'), None, None),
        (ANSWER.format(3.5), None, None),
        ('{"score": 1', None, None),  # of which digits may be missing
        ('{"explanation": "a \\"score\\": 3, or so"}', None, None),
        ("Score: 4", None, None),
        ("", None, None),
    ],
)
def test_an_answer(answer: str, of_four: float | None, of_five: float | None) -> None:
    assert T2iCompbench("shape").parse(answer, "", {}) == of_four
    assert T2iCompbench("complex").parse(answer, "", {}) == of_five


def test_parts_are_multiplied() -> None:
    judge = T2iCompbench()
    assert judge.score([ANSWER.format(3), ANSWER.format(2)], "", PARTS) == pytest.approx(0.15)
    assert judge.score([ANSWER.format(4)] * 2, "", PARTS) == 1.0
    assert judge.score([ANSWER.format(4), "It is green."], "", PARTS) is None
    assert judge.score([ANSWER.format(3)], "", {"category": "numeracy"}) == 0.6


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"category": "colour"}, f"category 'colour'; expected one of {CATEGORIES}"),
        ({"category": None}, f"category None; expected one of {CATEGORIES}"),
        ({"phrases": []}, "phrases []; expected a list with a text for each part of the prompt"),
        ({"nouns": "bench"}, "nouns 'bench'; expected a list with a text for each part of the prompt"),
        ({"attributes": [1, 2]}, "attributes [1, 2]; expected a list with a text for each part of the prompt"),
        ({"attributes": ["green"]}, "attributes has 1 texts, but phrases has 2"),
    ],
)
def test_a_row_that_cannot_be_asked_about(changed: dict[str, Any], message: str) -> None:
    assert told(ValueError, T2iCompbench().check_row, "p", PARTS | changed) == message


def test_a_category_that_is_none() -> None:
    assert told(ValueError, T2iCompbench, category="action") == f"category='action'; expected one of {CATEGORIES}"


def test_rows_that_are_refused_are_asked_nothing_where_errors_are_forgiven() -> None:
    refused = Prompt("a dog", 0, {"category": "color"}, place="rows.jsonl:1")
    assert _questions_of("t", T2iCompbench(), True, refused, None) == (None, [])
    assert told(RewardError, _questions_of, "t", T2iCompbench(), False, refused, None).startswith(
        "reward 't' has no question: ValueError: phrases None; expected a list with a text for each part of the prompt"
    )
    first, texts = _questions_of("t", T2iCompbench(), True, Prompt("a green bench and a blue bowl", 0, PARTS), None)
    assert first is not None and len(texts) == 2


@pytest.mark.parametrize("asked", ["one text", []])
def test_questions_are_a_list_of_texts(asked: Any) -> None:
    class Wrong(T2iCompbench):
        def questions(self, prompt: str, metadata: dict[str, Any]) -> list[str]:
            return asked

    assert told(RewardError, _questions_of, "t", Wrong("numeracy"), False, Prompt("a dog", 0, {}), None).startswith(
        f"reward 't' has no question: TypeError: questions returned {asked!r}; expected a list of at least one text on"
    )
