"""phalanx evaluate with vLLM: a model and its baseline one after the other in a process."""

import json
from pathlib import Path

import pytest

from tests.distributed.test_evaluation import evaluate, lm_words, written
from tests.helpers.ranks import run_ranks


@pytest.mark.long
def test_a_model_equals_itself(lm_folder: Path, tmp_path: Path) -> None:
    words = lm_words(lm_folder, tmp_path, "out", "rollout.engine=vllm", f"baseline={lm_folder}")
    run_ranks(evaluate, 1, words, timeout=280)
    records, part = written(tmp_path / "out")
    assert len({json.loads(line)["text"] for line in records.splitlines()}) > 10
    assert part["baseline"]["better_equal_worse"]["reward"]["samples"] == [0, 15, 0]
    assert part["baseline"]["differences"]["reward"]["best@2"]["value"] == 0.0
