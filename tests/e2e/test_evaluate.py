"""The command phalanx evaluate: its table and files, and one-line messages about mistakes."""

import json
import re
from pathlib import Path

import pytest

from phalanx.config.tasks import EvaluateConfig
from phalanx.run.rules import load_config
from phalanx.tools.evaluate import Evaluation
from tests.helpers.ranks import ROOT
from tests.helpers.tasks import run_task

FAILS = """
def fails(completions, prompts, metadata):
    raise KeyError("no such thing")
"""


def words(folder: Path, reward: str = "{name: gsm8k}") -> list[str]:
    rows = [{"question": f"Ann has {i} books and buys 2.", "answer": f"#### {i + 2}"} for i in range(3)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(FAILS)
    settings = ["model.path=assets/words/base", "model.dtype=float32", "data.max_prompt_length=64"]
    settings += ["data.max_response_length=8", "n=2"]
    data = [f"data.val_files=[{folder / 'sums.jsonl'}]", "data.prompt_key=question", "rollout.val.temperature=1"]
    return ["tasks/evaluate.py", *settings, *data, f"reward.functions=[{reward}]", f"output_dir={folder / 'out'}"]


def test_a_table_and_three_files(tmp_path: Path) -> None:
    done = run_task(words(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "sums: 3 prompts x 2, 95 % intervals over prompts"
    assert [line.split()[:2] for line in lines[2:7]] == [
        ["gsm8k", name] for name in ("mean", "avg@2", "pass@1", "pass@2", "majority@2")
    ]
    assert lines[-2:] == [
        f"6 samples in {tmp_path / 'out' / 'records.jsonl'}, their statistics in {tmp_path / 'out' / 'evaluation.json'}",
        f"page: {tmp_path / 'out' / 'evaluation.html'}",
    ]
    mean = json.loads((tmp_path / "out" / "evaluation.json").read_text())["sets"]["sums"]["scores"]["gsm8k"]["mean"]
    assert f"{mean['value']:.4f} [{mean['low']:.4f}, {mean['high']:.4f}]" in lines[2]
    assert "prompts x 2" in (tmp_path / "out" / "evaluation.html").read_text()


def test_records_that_were_lost_are_sampled_anew(tmp_path: Path) -> None:
    """If the last records of a complete evaluation are missing; a damaged one in the middle is an error."""
    records = tmp_path / "out" / "records.jsonl"
    assert run_task(words(tmp_path)).returncode == 0
    whole = records.read_text()
    records.write_text(whole[:-40])
    other = [*words(tmp_path), f"output_dir={tmp_path / 'other'}", f"baseline={tmp_path / 'out'}"]
    done = run_task(other)
    assert done.returncode == 2 and f"baseline: the evaluation in {records.parent} is incomplete" in done.stderr
    done = run_task(words(tmp_path))
    assert done.returncode == 0 and records.read_text() == whole, done.stderr
    lines = whole.splitlines(keepends=True)
    records.write_text("".join([lines[0], lines[1][:9] + "\n", *lines[2:]]))
    done = run_task(words(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: {records}:2: not a record of an evaluation; delete the file to sample again"
    )
    # an evaluation that ended with an error has released its folder
    assert not (tmp_path / "out" / "running.json").exists()


def test_a_reward_that_fails_is_one_line(tmp_path: Path) -> None:
    done = run_task(words(tmp_path, f"{{path: '{tmp_path / 'reward.py'}:fails'}}"), nproc=2)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: rank 0: reward 'fails' raised KeyError: 'no such thing' on")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "running.json").exists()
    assert not (tmp_path / "out" / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("reward.functions=[]", "reward.functions is empty; give what is measured, such as [{name: gsm8k}]"),
        ("data.val_files=[]", "data.val_files is empty; give the files of the prompts"),
        ("rollout.val.temprature=1", "unknown key rollout.val.temprature; did you mean rollout.val.temperature?"),
        ("rollout.val.n=4", "n and rollout.val.n are both set; give one of them"),
        ("group_by=level", "sums.jsonl:1 has no number or short text in a column 'level'; it has answer, ground_truth"),
        ("k=[4]", "k: 4 is not between 1 and n, the samples per prompt"),
        ("k=[0]", "k[0]: expected at least 1, got 0"),
        (
            "parallel.ulysses_sequence_parallel_size=2",
            "parallel.ulysses_sequence_parallel_size: 2 does not divide the 1 ranks",
        ),
        ("output_dir=Makefile", "output_dir: 'Makefile' is a file; give a folder"),
        ("rollout.val=3", "rollout.val: expected a section, got 3"),
        ("baseline=/no/where", "baseline: '/no/where': no such folder"),
        ("baseline=''", "baseline: expected a path, got ''"),
        ("output_dir=' '", "output_dir: expected a path, got ' '"),
        ("baseline=assets/words/test.jsonl", "baseline: 'assets/words/test.jsonl' is a single file"),
        ("baseline=assets/words", "baseline: assets/words has no config.json"),
        ("baseline=assets/digits/base", "baseline: 'assets/digits/base' is not the same kind of model"),
        (
            "model.path=org/model",
            "model.path: 'org/model' is not a folder on this machine; for a hub id, also set kind=lm or kind=flow",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, message: str) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=re.escape(message)):
        Evaluation(load_config(EvaluateConfig, None, [*words(tmp_path)[1:], changed]))
