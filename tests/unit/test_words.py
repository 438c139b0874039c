"""The word problems of the quickstarts, as they are shipped."""

import json
import random
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
from assets.make import calculator, words
from assets.make.words import SPLITS

from phalanx.zoo.rewards.text.gsm8k import truth
from tests.helpers.ranks import ROOT

SETS = pytest.mark.parametrize(("name", "module"), [("words", words), ("calculator", calculator)])


@SETS
def test_they_are_made_again(name: str, module: ModuleType, tmp_path: Path) -> None:
    module.write_data(tmp_path)
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_text() == (ROOT / "assets" / name / f"{split}.jsonl").read_text()


@SETS
def test_splits_have_no_steps_in_common(name: str, module: ModuleType) -> None:
    steps = {}
    for split in SPLITS:
        rows = [json.loads(line) for line in (ROOT / "assets" / name / f"{split}.jsonl").read_text().splitlines()]
        steps[split] = {row["answer"] for row in rows}
    assert not steps["train"] & (steps["val"] | steps["test"]) and not steps["val"] & steps["test"]


def test_answers_are_right() -> None:
    for problem in [*words.problems(500, 7, "train"), *islice(calculator.problems(7, "train"), 500)]:
        for step in problem.steps:
            question, result = step.split("=")
            assert eval(question) == int(result)
        assert truth(f"#### {problem.answer}") == int(problem.steps[-1].split("=")[1]) == problem.answer > 0


def test_both_steps_are_one_expression() -> None:
    for problem in islice(calculator.problems(3, "train"), 200):
        assert eval(calculator.whole(problem)) == problem.answer


def test_another_operation() -> None:
    assert calculator.another("47*343", random.Random(0)) in ("47+343", "47-343")
