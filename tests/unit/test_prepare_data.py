"""tasks/prepare_data.py: training data for language models from all kinds of sources."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.messages import ConfigError
from phalanx.config.tasks import INSTRUCTIONS, PrepareDataConfig
from phalanx.data.prompts import load_prompts
from phalanx.run.rules import load_config
from phalanx.tools import prepare_data
from phalanx.tools.prepare_data import PrepareData
from phalanx.types import JobError
from phalanx.zoo.rewards.text.gsm8k import Gsm8k
from phalanx.zoo.rewards.text.reasoning_gym import ReasoningGym
from tests.helpers.rewards import told
from tests.unit.test_data import write_parquet

GSM8K = [{"question": f"What is {i} + {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(20)]
HASH, BOXED = prepare_data.INSTRUCTIONS["hash"], prepare_data.INSTRUCTIONS["boxed"]


def jsonl(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def prepared(folder: Path, *keys: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of each file that a run writes."""
    PrepareData(load_config(PrepareDataConfig, None, [f"output_dir={folder}", *keys])).run()
    return {file.stem: [json.loads(line) for line in file.open()] for file in sorted(folder.glob("*.jsonl"))}


def mistake(*keys: str) -> str:
    return told(ConfigError, lambda: PrepareData(load_config(PrepareDataConfig, None, list(keys))))


def test_gsm8k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GSM8K's rows; duplicates and prompts of the test set are omitted and reported; the split is reproducible."""
    again = [{"question": "what is 3 +  3?", "answer": "#### 6"}]
    source = jsonl(tmp_path / "train.jsonl", GSM8K + again)
    test = jsonl(tmp_path / "test.jsonl", [GSM8K[5], {"question": "New?", "answer": "#### 1,000"}])
    keys = (f"source={source}", f"test_source={test}", "val_size=4")
    files = prepared(tmp_path / "out", *keys)
    assert {name: len(rows) for name, rows in files.items()} == {"test": 2, "train": 15, "val": 4}
    assert files["test"][1] == {"prompt": f"New? {HASH}", "ground_truth": "1,000", "answer": "#### 1,000"}
    prompts = [row["prompt"] for rows in files.values() for row in rows]
    assert len(set(prompts)) == 21 and all(prompt.endswith(f"? {HASH}") for prompt in prompts)
    said = capsys.readouterr().out.splitlines()
    assert said[1:] == [
        f"instruction: {HASH}",
        "1 prompts of the source are duplicates: left out",
        "1 prompts of the source are also in test_source: left out",
    ]
    assert prepared(tmp_path / "out2", *keys) == files
    assert prepared(tmp_path / "out3", *keys, "seed=1")["val"] != files["val"]
    (row, *_) = load_prompts([str(tmp_path / "out" / "train.jsonl")], "data.train_files", quoted=False)
    assert Gsm8k()([f"#### {row.meta['ground_truth']}"], ["?"], [row.meta]) == [1]


def test_proofs_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If most solutions mark their answers, any unmarked one is a proof; otherwise only long ones are."""
    boxed = [{"problem": f"What is {i}+1?", "solution": f"It is \\boxed{{{i + 1}}}."} for i in range(4)]
    proofs = [{"problem": f"Show {i}.", "solution": "It holds. " * n} for i, n in enumerate((1, 90))]
    source = jsonl(tmp_path / "most.jsonl", [proofs[0], *boxed, proofs[1]])
    (rows,) = prepared(tmp_path / "out", f"source={source}", "val_size=0").values()
    assert [row["ground_truth"] for row in rows] == ["1", "2", "3", "4"]
    told = f"source: {source}: 2 of 6 solutions do not mark an answer, first in prompt 0: left out"
    assert told in capsys.readouterr().out.splitlines()
    plain = [{"problem": f"How many {i}?", "solution": str(i)} for i in range(5)]
    source = jsonl(tmp_path / "few.jsonl", [*boxed, *plain, proofs[1]])
    (rows,) = prepared(tmp_path / "out2", f"source={source}", "val_size=0").values()
    assert [row["ground_truth"] for row in rows] == ["1", "2", "3", "4", "0", "1", "2", "3", "4"]


def test_math_and_verl(tmp_path: Path) -> None:
    """Boxed solutions; chats, whose last message gets the instruction; separate columns of answers and solutions."""
    rows = [
        {"problem": f"p{i}\nline", "solution": rf"so $\boxed{{\frac{{{i}}}{{2}}}}$.", "level": "1"} for i in range(3)
    ]
    files = prepared(tmp_path / "a", f"source={jsonl(tmp_path / 'm.jsonl', rows)}", "val_size=0")
    assert list(files) == ["train"]
    assert files["train"][1] == {
        "prompt": f"p1\nline\n{BOXED}",
        "ground_truth": r"\frac{1}{2}",
        **without(rows[1], "problem"),
    }
    rows = [row | {"answer": "7"} for row in rows]
    files = prepared(tmp_path / "b", f"source={jsonl(tmp_path / 'm.jsonl', rows)}", "val_size=1", "instruction=line")
    assert files["train"][0]["ground_truth"] == "7" and files["train"][0]["prompt"].endswith("final answer.")
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1?"}]
    verl = [{"data_source": "d", "prompt": talk, "reward_model": {"style": "rule", "ground_truth": "2"}}]
    source = write_parquet(tmp_path / "v.parquet", verl)
    files = prepared(tmp_path / "c", f"source={source}", "val_size=0")
    assert files["train"] == [{"prompt": talk, "ground_truth": "2", "data_source": "d"}]
    files = prepared(tmp_path / "d", f"source={source}", "val_size=0", "suffix=Say it.")
    assert files["train"][0]["prompt"] == [talk[0], {"role": "user", "content": "1+1? Say it."}]


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


def test_reasoning_gym(tmp_path: Path) -> None:
    files = prepared(
        tmp_path, "reasoning_gym=[chain_sum&min_terms=2&max_terms=2, leg_counting]", "size=6", "val_size=2"
    )
    rows = files["train"] + files["val"]
    assert len(rows) == 12 and {row["data_source"] for row in rows} == {
        "reasoning_gym/chain_sum",
        "reasoning_gym/leg_counting",
    }
    assert all(row["prompt"].endswith("<answer> and </answer>.") for row in rows)
    answers = [f"<answer>{row['ground_truth']}</answer>" for row in rows]
    assert list(ReasoningGym()(answers, ["?"] * 12, rows).scores) == [1.0] * 12
    terms = [row["reasoning_gym"]["entry"]["metadata"]["num_terms"] for row in rows if "chain" in row["data_source"]]
    assert terms == [2] * 6


def test_the_instructions_are_those_of_the_schema() -> None:
    assert tuple(prepare_data.INSTRUCTIONS) == INSTRUCTIONS


def test_a_benchmark_has_only_a_test_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of it is omitted, and no other file is written; ~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = jsonl(tmp_path / "s.jsonl", [*GSM8K, GSM8K[0]])
    PrepareData(load_config(PrepareDataConfig, None, [f"test_source={source}", "output_dir=~/out"])).run()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["test.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "test.jsonl").open()]
    assert [row["prompt"] for row in rows] == [f"{row['question']} {HASH}" for row in [*GSM8K, GSM8K[0]]]


def test_mistakes(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "s.jsonl", GSM8K)
    assert mistake() == ("give either source, a file, or reasoning_gym, a list of its tasks, or only test_source")
    assert mistake(f"source={source}", "reasoning_gym=[chain_sum]") == mistake()
    assert mistake(f"source={source}", "val_size=20") == "val_size: 20 of 20 distinct prompts leave none to train on"
    assert mistake(f"source={source}", "answer_key=solution") == (
        f"source: {source}: prompt 0 has no answer; expected one in solution: answer_key"
    )
    odd = jsonl(tmp_path / "o.jsonl", [{"text": "a"}])
    assert mistake(f"source={odd}") == (
        f"source: {odd}:1: no 'prompt'; it has text; prompt_key names the column of the prompts"
    )
    cut = jsonl(tmp_path / "c.jsonl", [{"problem": "a", "solution": r"so \boxed{1"}])
    assert mistake(f"source={cut}") == rf"source: {cut}: prompt 0 has a solution without an answer: 'so \\boxed{{1'"
    assert mistake("reasoning_gym=[chainsum]") == "reasoning_gym: there is no task 'chainsum'; did you mean chain_sum?"
    assert mistake("reasoning_gym=[chain_sum&terms=1]").startswith(
        'reasoning_gym: task chain_sum with {"terms": 1}: TypeError: '
    )
    assert mistake("reasoning_gym=[arc_agi]", "size=1") == (
        "reasoning_gym: task arc_agi: its verifier does not accept problems that were converted to JSON and back"
    )
    folder = tmp_path / "file"
    folder.write_text("")
    job = PrepareData(
        load_config(PrepareDataConfig, None, [f"source={source}", "val_size=1", f"output_dir={folder}/x"])
    )
    assert told(JobError, job.run) == f"output_dir: '{folder}/x' cannot be written: Not a directory"
