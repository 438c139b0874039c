"""The word problems of the quickstart, as they are shipped."""

import json
from pathlib import Path

import pytest
from assets.make.words import SPLITS, problems, write_data

from phalanx.rewards.text.gsm8k import truth
from tests.ranks import ROOT

SHIPPED = ROOT / "assets" / "words"


@pytest.mark.parametrize("split", SPLITS)
def test_they_are_made_again(split: str, tmp_path: Path) -> None:
    write_data(tmp_path)
    assert (tmp_path / f"{split}.jsonl").read_text() == (SHIPPED / f"{split}.jsonl").read_text()


def test_splits_have_no_steps_in_common() -> None:
    steps = {}
    for split in SPLITS:
        rows = [json.loads(line) for line in (SHIPPED / f"{split}.jsonl").read_text().splitlines()]
        steps[split] = {row["answer"] for row in rows}
    assert not steps["train"] & (steps["val"] | steps["test"]) and not steps["val"] & steps["test"]


def test_answers_are_right() -> None:
    for problem in problems(500, 7, "train"):
        for step in problem.steps:
            question, result = step.split("=")
            assert eval(question) == int(result)
        assert truth(f"#### {problem.answer}") == int(problem.steps[-1].split("=")[1]) == problem.answer > 0
