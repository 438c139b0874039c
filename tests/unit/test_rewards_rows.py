"""Rewards are asked about the rows of the data before any sample is drawn, and a row without an answer costs its own."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config.flow import FlowRewardConfig, FlowRewardFunctionConfig
from phalanx.config.reward import RewardConfig, RewardFunctionConfig
from phalanx.data.prompts import load_prompts, validation_sets
from phalanx.rewards import RewardSet
from phalanx.types import Prompt
from tests.helpers.rewards import scored, told

HERE = __name__
ANSWERS = ["1", "2", None, "4"] + ["5"] * 10


class Positive:
    """A user's reward that compares all samples of a call, so its calls are never split."""

    def check_row(self, prompt: str, metadata: dict[str, Any]) -> None:
        if metadata["ground_truth"] < 0:
            raise ValueError(f"a negative ground_truth, {metadata['ground_truth']}")

    def __call__(self, images: Any, prompts: list[str], metadata: list[dict[str, Any]]) -> list[float]:
        assert all(meta["ground_truth"] >= 0 for meta in metadata)
        return [float(len(images))] * len(images)


def trl(completions: list[str], ground_truth: list[str], **kwargs: Any) -> list[float]:
    return [float(c == g) for c, g in zip(completions, ground_truth, strict=True)]


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth)


def rewards(name: str, on_error: str = "fail") -> RewardSet:
    known = {"path": f"{HERE}:{name}"} if name in globals() else {"name": name}
    kwargs = {"equivalence": "string"} if name == "math" else {}
    entry = RewardFunctionConfig(**known, kwargs=kwargs)
    return RewardSet(RewardConfig(functions=[entry], on_error=on_error), "cpu", outputs="completions")


@pytest.fixture
def rows(tmp_path: Path) -> list[Prompt]:
    lines = []
    for i, answer in enumerate(ANSWERS):
        row = {"prompt": f"p{i}", "ground_truth": answer}
        lines.append(json.dumps(row if answer is not None else {"prompt": f"p{i}"}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    return load_prompts([str(tmp_path / "train.jsonl")], "data.train_files", quoted=False)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gsm8k", "gsm8k needs a ground_truth for each prompt, a number or a solution that ends with #### 18"),
        ("math", "math found no ground_truth; expected a text or a number in the data's column ground_truth"),
        ("dapo", "dapo found no ground_truth; expected a text or a number in the data's column ground_truth"),
        ("trl", "its function needs the column 'ground_truth', which the row does not have"),
        ("verl", "its function needs a ground_truth, which the row does not have"),
    ],
)
def test_a_row_without_an_answer_is_named(
    name: str, problem: str, rows: list[Prompt], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = f"data.train_files: {tmp_path}/train.jsonl:3: reward {name!r}: {problem}"
    assert told(ValueError, rewards(name).check_rows, rows, first=True) == line
    rewards(name).check_rows([row for row in rows if "ground_truth" in row.meta], first=True)
    held_out = validation_sets([f"{tmp_path}/train.jsonl"], quoted=False)["train"]
    assert "data.val_files: " in told(ValueError, rewards(name).check_rows, held_out, first=True)
    # forgiven, unless there are too many
    with caplog.at_level(logging.WARNING):
        rewards(name, "zero").check_rows(rows, first=True)
        rewards(name, "zero").check_rows(rows, first=False)
    assert caplog.messages == [f"samples of a row have no score: {line}"]
    assert told(ValueError, rewards(name, "zero").check_rows, [rows[2]] * 2 + rows[:2], first=True) == (
        f"{line} (and 1 more of 4 rows)"
    )


@pytest.mark.parametrize("name", ["gsm8k", "trl", "verl"])
def test_a_row_without_an_answer_costs_its_own_samples(name: str, rows: list[Prompt]) -> None:
    prompts = [Prompt(row.text, i, row.meta) for i, row in enumerate(rows[:4])]
    lenient = rewards(name, "skip")
    assert str(scored(lenient, (["#### 1", "2", "#### 3", "#### 4"] * 2, prompts * 2))[name]).count("nan") == 2
    assert lenient.refused == 2 and lenient.problem is not None and 'on the prompt "p2": ' in lenient.problem
    scored(lenient, (["#### 1"], prompts[:1]))
    assert lenient.refused == 0 and lenient.problem is None


def test_a_class_of_ones_own_is_given_the_other_samples_of_a_call() -> None:
    entry = FlowRewardFunctionConfig(path=f"{HERE}:Positive")
    reward = RewardSet(FlowRewardConfig(functions=[entry], on_error="zero"), "cpu")
    prompts = [Prompt(f"p{i}", i, {"ground_truth": truth}) for i, truth in enumerate((1, -1, 1))]
    assert str(scored(reward, (torch.zeros(3, 3, 4, 4), prompts))) == "{'Positive': [2.0, nan, 2.0]}"
    assert reward.problem == "reward 'Positive' has no score on the prompt \"p1\": a negative ground_truth, -1"
    # for videos, frame by frame
    assert str(scored(reward, (torch.zeros(3, 2, 3, 4, 4), prompts))) == "{'Positive': [4.0, nan, 4.0]}"
    assert reward.refused == 1
